// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `netlink`: RDMA_NLDEV_CMD_GET_CHARDEV tells which character device serves a port.

#![forbid(unsafe_code)]

use std::os::unix::fs::MetadataExt;

use ktap::prelude::*;
use selftests::netlink::{Chardev, Rdma};

fn expected(number: u32) -> Chardev {
    Chardev {
        name: format!("umad{number}"),
        abi: 5,
        major: 231,
        minor: number.into(),
    }
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("netlink");

    area.check("umad of each port: name, number and ABI 5", || {
        let mut rdma = Rdma::open()?;
        for (ibdev, number) in [("rxe0", 0), ("rxe1", 1)] {
            let index = rdma.index(ibdev)?;
            let got = rdma.chardev("umad", Some(index), Some(1))?;
            ensure_eq!(got, expected(number), "{ibdev}");
        }
        Ok(())
    });
    area.check("the answer agrees with the node", || {
        let mut rdma = Rdma::open()?;
        let index = rdma.index("rxe1")?;
        let got = rdma.chardev("umad", Some(index), Some(1))?;
        let node = std::fs::metadata(format!("/dev/infiniband/{}", got.name))?;
        ensure_eq!(nix::sys::stat::major(node.rdev()), got.major);
        ensure_eq!(nix::sys::stat::minor(node.rdev()), got.minor);
        Ok(())
    });
    area.check("a port that the device has not: EINVAL", || {
        let mut rdma = Rdma::open()?;
        let index = rdma.index("rxe0")?;
        for port in [0, 2, 255, 0x1_0001, u32::MAX] {
            let got = rdma.chardev("umad", Some(index), Some(port));
            ensure_errno!(got, EINVAL, "port {port}");
        }
        Ok(())
    });
    area.check("no port: EINVAL", || {
        let mut rdma = Rdma::open()?;
        let index = rdma.index("rxe0")?;
        ensure_errno!(rdma.chardev("umad", Some(index), None), EINVAL);
        Ok(())
    });
    area.check("a port without a device: EINVAL", || {
        ensure_errno!(Rdma::open()?.chardev("umad", None, Some(1)), EINVAL);
        Ok(())
    });
    area.check(
        "no device: EOPNOTSUPP, umad has no device for all ports",
        || {
            ensure_errno!(Rdma::open()?.chardev("umad", None, None), EOPNOTSUPP);
            Ok(())
        },
    );
    area.check("issm on RoCE: EOPNOTSUPP", || {
        let mut rdma = Rdma::open()?;
        for ibdev in ["rxe0", "rxe1"] {
            let index = rdma.index(ibdev)?;
            let got = rdma.chardev("issm", Some(index), Some(1));
            ensure_errno!(got, EOPNOTSUPP, "{ibdev}");
        }
        Ok(())
    });
    area.check("issm for a port that the device has not: EINVAL", || {
        let mut rdma = Rdma::open()?;
        let index = rdma.index("rxe0")?;
        ensure_errno!(rdma.chardev("issm", Some(index), Some(2)), EINVAL);
        Ok(())
    });
    area.check("a device index that nobody has: EINVAL", || {
        ensure_errno!(Rdma::open()?.chardev("umad", Some(0xffff), Some(1)), EINVAL);
        Ok(())
    });
    area.check(
        "a device that came later is answered, and not after it went",
        || {
            let pair = RxePair::plain("nl")?;
            pair.a.plug()?;
            let mut rdma = Rdma::open()?;
            let index = rdma.index(&pair.a.ibdev)?;
            let got = rdma.chardev("umad", Some(index), Some(1))?;
            ensure_eq!(got, expected(pair.a.umad()?));
            pair.a.unplug()?;
            ensure_errno!(rdma.chardev("umad", Some(index), Some(1)), EINVAL);
            Ok(())
        },
    );
    area.check(
        "the name is umad's own after a rename of the device",
        || {
            let pair = RxePair::plain("nl")?;
            pair.a.plug()?;
            let number = pair.a.umad()?;
            let mut rdma = Rdma::open()?;
            run("rdma dev set rxe_nl0 name another")?;
            let index = rdma.index("another");
            let got = index.and_then(|index| rdma.chardev("umad", Some(index), Some(1)));
            run("rdma dev set another name rxe_nl0")?;
            ensure_eq!(got?, expected(number));
            Ok(())
        },
    );
    area.check(
        "asking while devices come and go gives an answer or EINVAL",
        || {
            let pair = RxePair::plain("nl")?;
            let mut asker = fork(|| {
                let mut rdma = Rdma::open()?;
                loop {
                    let Ok(index) = rdma.index("rxe_nl0") else {
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    };
                    match rdma.chardev("umad", Some(index), Some(1)) {
                        Ok(got) => ensure_eq!(got, expected(2)),
                        // EOPNOTSUPP: ib_core shows the device before, or after, it is umad's.
                        Err(e) => ensure!(matches!(e, Errno::EINVAL | Errno::EOPNOTSUPP), "{e}"),
                    }
                }
            })?;
            for _ in 0..12 {
                pair.a.plug()?;
                pair.a.unplug()?;
            }
            let running = asker.is_running();
            if running {
                return asker.kill(selftests::task::MUST);
            }
            asker.wait(selftests::task::MUST)
        },
    );

    area.run()
}

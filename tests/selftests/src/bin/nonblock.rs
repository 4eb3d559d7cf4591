// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `nonblock`: O_NONBLOCK, and the access modes of a file.

#![forbid(unsafe_code)]

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use ktap::peers::{QUIET, SOON};
use ktap::prelude::*;
use nix::fcntl::{fcntl, FcntlArg, OFlag};
use nix::poll::PollFlags;
use selftests::task::{handle_signal, Task, MUST};

/// Bytes of a header and a MAD in the new layout.
const PACKET: usize = 64 + 256;

fn set_nonblock(file: impl AsFd, on: bool) -> Outcome {
    let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
    let mut flags = flags;
    flags.set(OFlag::O_NONBLOCK, on);
    fcntl(&file, FcntlArg::F_SETFL(flags))?;
    Ok(())
}

/// Peers whose receiver does not block.
fn peers() -> Outcome<Peers> {
    let peers = Peers::new()?;
    set_nonblock(&peers.b.port, true)?;
    Ok(peers)
}

fn arrives(port: &Port) -> Outcome {
    let events = port.poll(PollFlags::POLLIN, SOON)?;
    ensure!(events.contains(PollFlags::POLLIN), "nothing came");
    Ok(())
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("nonblock");

    area.check("read() of an empty queue: EAGAIN", || {
        let port = Port::options().nonblock(true).open(0)?;
        let mut buffer = [0; PACKET];
        ensure_errno!(port.read(&mut buffer), EAGAIN);
        port.register2(&Registration::send_only())?;
        ensure_errno!(port.read(&mut buffer), EAGAIN);
        Ok(())
    });
    area.check("EAGAIN leaves the buffer alone", || {
        let port = Port::options().nonblock(true).open(0)?;
        let mut buffer = [0xa5; PACKET];
        ensure_errno!(port.read(&mut buffer), EAGAIN);
        ensure!(buffer.iter().all(|byte| *byte == 0xa5));
        Ok(())
    });
    area.check(
        "a buffer that is shorter than the header: EINVAL before EAGAIN",
        || {
            for layout in [Layout::Old, Layout::New] {
                let port = Port::options().nonblock(true).layout(layout).open(0)?;
                let mut buffer = vec![0; layout.header_len()];
                let short = layout.header_len() - 1;
                ensure_errno!(port.read(&mut buffer[..short]), EINVAL);
                ensure_errno!(port.read(&mut []), EINVAL);
                ensure_errno!(port.read(&mut buffer), EAGAIN);
            }
            Ok(())
        },
    );
    area.check("a packet is read, then it is EAGAIN again", || {
        let peers = peers()?;
        let mut buffer = [0; PACKET];
        for _ in 0..3 {
            peers
                .a
                .port
                .send(&peers.a.packet(&peers.b, Method::SEND, fresh_tid()))?;
            arrives(&peers.b.port)?;
            ensure_eq!(peers.b.port.read(&mut buffer)?, PACKET);
            ensure_errno!(peers.b.port.read(&mut buffer), EAGAIN);
        }
        Ok(())
    });
    area.check(
        "after a read that failed the packet is there at once",
        || {
            let peers = peers()?;
            peers
                .a
                .port
                .send(&peers.a.packet(&peers.b, Method::SEND, fresh_tid()))?;
            arrives(&peers.b.port)?;
            let mut buffer = [0; PACKET];
            ensure_errno!(peers.b.port.read(&mut buffer[..PACKET - 1]), EINVAL);
            ensure_eq!(peers.b.port.read(&mut buffer)?, PACKET);
            Ok(())
        },
    );
    area.check(
        "O_NONBLOCK set by fcntl() counts from the next read()",
        || {
            let port = Port::open(0)?;
            set_nonblock(&port, true)?;
            let mut buffer = [0; PACKET];
            ensure_errno!(port.read(&mut buffer), EAGAIN);
            Ok(())
        },
    );
    area.check("a reader that sleeps already goes on sleeping", || {
        handle_signal(false);
        let port = Arc::new(Port::open(0)?);
        let reading = Arc::clone(&port);
        let mut read = Task::start_asleep(libc::SYS_read, move || {
            let mut buffer = [0; PACKET];
            reading.read(&mut buffer)
        });
        set_nonblock(&*port, true)?;
        // Nothing shall happen, so there is nothing to wait for but the bound.
        ensure!(!read.within(QUIET), "it ended: {:?}", read.result(QUIET));
        // Begun anew after a signal it would not block; here it is interrupted.
        match read.stop() {
            Some(result) => ensure_errno!(result, EINTR),
            None => ensure!(false, "a signal did not end it"),
        }
        Ok(())
    });
    area.check("without O_NONBLOCK read() waits for the packet", || {
        let Peers { a, b } = peers()?;
        set_nonblock(&b.port, false)?;
        let request = a.packet(&b, Method::SEND, fresh_tid());
        let port = Arc::new(b.port);
        let reading = Arc::clone(&port);
        let mut read = Task::start_asleep(libc::SYS_read, move || {
            let mut buffer = [0; PACKET];
            reading.read(&mut buffer)
        });
        ensure!(!read.within(QUIET), "it did not wait");
        a.port.send(&request)?;
        ensure!(matches!(read.result(MUST), Some(Ok(PACKET))));
        Ok(())
    });
    area.check("write() never says EAGAIN", || {
        let peers = Peers::new()?;
        set_nonblock(&peers.a.port, true)?;
        // Many more than the send queue of QP 1 holds.
        for _ in 0..1000 {
            let packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            peers.a.port.send(&packet)?;
        }
        // Most of them come: what QP 1 of the peer has no buffer for is lost, as on any wire.
        let mut came = 0;
        while peers.b.port.recv_timeout(QUIET).is_ok() {
            came += 1;
        }
        ensure!((100..=1000).contains(&came), "{came} of 1000 came");
        Ok(())
    });
    area.check("one of two descriptors of a file changes both", || {
        let port = Port::open(0)?;
        let copy = Port::from_fd(nix::unistd::dup(&port)?);
        set_nonblock(&copy, true)?;
        let mut buffer = [0; PACKET];
        ensure_errno!(port.read(&mut buffer), EAGAIN);
        Ok(())
    });
    area.check(
        "a file opened for reading only: write() is EBADF, ioctl and read() work",
        || {
            let file = File::open("/dev/infiniband/umad0")?;
            set_nonblock(&file, true)?;
            let port = Port::from_fd(file.into());
            port.register2(&Registration::send_only())?;
            ensure_errno!(port.write(&[0; PACKET]), EBADF);
            let mut buffer = [0; PACKET];
            ensure_errno!(port.read(&mut buffer), EAGAIN);
            Ok(())
        },
    );
    area.check(
        "a file opened for writing only: read() is EBADF, ioctl and write() work",
        || {
            let peers = Peers::new()?;
            let file = File::options().write(true).open("/dev/infiniband/umad0")?;
            let port = Port::from_fd(file.into());
            let agent = port.register2(&Registration::send_only())?;
            let mut packet = peers.a.packet(&peers.b, Method::SEND, fresh_tid());
            packet.agent = agent;
            port.send(&packet)?;
            peers.b.recv_tid(packet.tid()?)?;
            let mut buffer = [0; PACKET];
            ensure_errno!(port.read(&mut buffer), EBADF);
            Ok(())
        },
    );

    area.run()
}

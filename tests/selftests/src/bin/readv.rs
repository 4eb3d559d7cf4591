// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `readv`: the calls that a port answers in a way of its own (readv and writev go segment by
//! segment), and those that it does not know.

#![forbid(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsFd;

use ktap::peers::SOON;
use ktap::prelude::*;
use nix::fcntl::{splice, SpliceFFlags};
use nix::sys::sendfile::sendfile;
use nix::sys::uio::{preadv, pwritev, readv, writev};
use nix::unistd::{lseek, Whence};

const PACKET: usize = 64 + 256;

/// Peers with so many MADs in the receiver's queue; returns their TIDs too.
fn queued(count: usize) -> Outcome<(Peers, Vec<u32>)> {
    let peers = Peers::new()?;
    let mut tids = Vec::new();
    for _ in 0..count {
        let tid = fresh_tid();
        peers
            .a
            .port
            .send(&peers.a.packet(&peers.b, Method::SEND, tid))?;
        tids.push(tid.low());
    }
    // Packets of a port stay in order: when a later one has come, all others are there.
    let registration = Peers::registration(0x31);
    Peers::with("rxe0", "rxe1", Layout::New, &registration)?.deliver(fresh_tid())?;
    Ok((peers, tids))
}

fn tid_of(buffer: &[u8]) -> Outcome<u32> {
    Ok(Packet::from_bytes(buffer, Layout::New)?.tid()?.low())
}

fn readv_checks(area: &mut ktap::Area) {
    area.check(
        "readv() fills each segment with a packet of its own",
        || {
            let (peers, tids) = queued(3)?;
            let mut buffers = [[0; PACKET]; 3];
            let [one, two, three] = &mut buffers;
            let mut segments = [one, two, three].map(|b| IoSliceMut::new(b));
            ensure_eq!(readv(&peers.b.port, &mut segments)?, 3 * PACKET);
            for (buffer, tid) in buffers.iter().zip(tids) {
                ensure_eq!(tid_of(buffer)?, tid);
            }
            Ok(())
        },
    );
    area.check(
        "readv() stops at a segment that is longer than its packet",
        || {
            let (peers, tids) = queued(2)?;
            let (mut long, mut next) = ([0; PACKET + 1], [0; PACKET]);
            let mut segments = [IoSliceMut::new(&mut long), IoSliceMut::new(&mut next)];
            ensure_eq!(readv(&peers.b.port, &mut segments)?, PACKET);
            ensure_eq!(tid_of(&long[..PACKET])?, tids[0]);
            ensure!(next.iter().all(|byte| *byte == 0));
            ensure_eq!(peers.b.recv()?.tid()?.low(), tids[1]);
            Ok(())
        },
    );
    area.check(
        "readv() ends early where no packet is left (O_NONBLOCK)",
        || {
            let (peers, tids) = queued(1)?;
            let flag = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK);
            nix::fcntl::fcntl(&peers.b.port, flag)?;
            let (mut one, mut two) = ([0; PACKET], [0; PACKET]);
            let mut segments = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
            ensure_eq!(readv(&peers.b.port, &mut segments)?, PACKET);
            ensure_errno!(readv(&peers.b.port, &mut segments), EAGAIN);
            ensure_eq!(tid_of(&one)?, tids[0]);
            Ok(())
        },
    );
    area.check(
        "header and MAD in two segments: EINVAL, the packet stays",
        || {
            let (peers, tids) = queued(1)?;
            let (mut header, mut mad) = ([0; 64], [0; 256]);
            let mut segments = [IoSliceMut::new(&mut header), IoSliceMut::new(&mut mad)];
            ensure_errno!(readv(&peers.b.port, &mut segments), EINVAL);
            ensure_eq!(peers.b.recv()?.tid()?.low(), tids[0]);
            Ok(())
        },
    );
    area.check(
        "a second segment that is too small: the first packet, the second stays",
        || {
            let (peers, tids) = queued(2)?;
            let (mut one, mut two) = ([0; PACKET], [0; PACKET - 1]);
            let mut segments = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
            ensure_eq!(readv(&peers.b.port, &mut segments)?, PACKET);
            ensure_eq!(tid_of(&one)?, tids[0]);
            ensure_eq!(peers.b.recv()?.tid()?.low(), tids[1]);
            Ok(())
        },
    );
    area.check(
        "an empty segment before others: EINVAL, the packet stays",
        || {
            let (peers, tids) = queued(1)?;
            let (mut none, mut one) = ([0; 0], [0; PACKET]);
            let mut segments = [IoSliceMut::new(&mut none), IoSliceMut::new(&mut one)];
            let got = readv(&peers.b.port, &mut segments);
            // As read() does with an empty buffer.
            ensure_errno!(got, EINVAL);
            ensure_eq!(peers.b.recv()?.tid()?.low(), tids[0]);
            Ok(())
        },
    );
    area.check("no segments at all: 0 bytes", || {
        let peers = Peers::new()?;
        ensure_eq!(readv(&peers.b.port, &mut [])?, 0);
        ensure_eq!(writev(&peers.a.port, &[])?, 0);
        Ok(())
    });
}

fn writev_checks(area: &mut ktap::Area) {
    area.check("writev() sends each segment as a packet of its own", || {
        let peers = Peers::new()?;
        let tids: Vec<_> = (0..3).map(|_| fresh_tid()).collect();
        let packets: Vec<_> = tids
            .iter()
            .map(|tid| peers.a.packet(&peers.b, Method::SEND, *tid))
            .map(|packet| packet.to_bytes(Layout::New))
            .collect();
        let segments: Vec<_> = packets.iter().map(|p| IoSlice::new(p)).collect();
        ensure_eq!(writev(&peers.a.port, &segments)?, 3 * PACKET);
        for tid in tids {
            ensure_eq!(peers.b.recv()?.tid()?.low(), tid.low());
        }
        Ok(())
    });
    area.check(
        "header and MAD in two segments: EINVAL, nothing is sent",
        || {
            let peers = Peers::new()?;
            let bytes = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .to_bytes(Layout::New);
            let segments = [IoSlice::new(&bytes[..64]), IoSlice::new(&bytes[64..])];
            ensure_errno!(writev(&peers.a.port, &segments), EINVAL);
            peers.b.nothing_comes()
        },
    );
    area.check(
        "writev() ends before a bad segment, and tells what it has sent",
        || {
            let peers = Peers::new()?;
            let tid = fresh_tid();
            let good = peers
                .a
                .packet(&peers.b, Method::SEND, tid)
                .to_bytes(Layout::New);
            let mut bad = good.clone();
            bad[0] = 77; // no such agent
            let segments = [IoSlice::new(&good), IoSlice::new(&bad), IoSlice::new(&good)];
            ensure_eq!(writev(&peers.a.port, &segments)?, PACKET);
            ensure_eq!(peers.b.recv()?.tid()?.low(), tid.low());
            peers.b.nothing_comes()
        },
    );
    area.check(
        "an empty write(): EINVAL; writev() of empty segments only: 0",
        || {
            let peers = Peers::new()?;
            ensure_errno!(peers.a.port.write(&[]), EINVAL);
            // The kernel does not call the port for it.
            ensure_eq!(writev(&peers.a.port, &[IoSlice::new(&[])])?, 0);
            Ok(())
        },
    );
}

fn other_calls(area: &mut ktap::Area) {
    area.check("lseek(): ESPIPE, from everywhere to everywhere", || {
        let port = Port::open(0)?;
        for whence in [
            Whence::SeekSet,
            Whence::SeekCur,
            Whence::SeekEnd,
            Whence::SeekData,
            Whence::SeekHole,
        ] {
            for offset in [0, 1, -1] {
                ensure_errno!(lseek(&port, offset, whence), ESPIPE, "{whence:?} {offset}");
            }
        }
        Ok(())
    });
    area.check("pread(), pwrite(), preadv() and pwritev(): ESPIPE", || {
        let (peers, tids) = queued(1)?;
        let mut buffer = [0; PACKET];
        let port = &peers.b.port;
        for offset in [0, 64] {
            let got = nix::sys::uio::pread(port, &mut buffer, offset);
            ensure_errno!(got, ESPIPE);
            ensure_errno!(nix::sys::uio::pwrite(port, &buffer, offset), ESPIPE);
            let segments = &mut [IoSliceMut::new(&mut buffer)];
            ensure_errno!(preadv(port, segments, offset), ESPIPE);
            ensure_errno!(pwritev(port, &[IoSlice::new(&buffer)], offset), ESPIPE);
        }
        ensure_eq!(peers.b.recv()?.tid()?.low(), tids[0]);
        Ok(())
    });
    area.check("mmap(): ENODEV", || {
        let port = Port::open(0)?;
        ensure_errno!(selftests::calls::map_shared(port.as_fd()), ENODEV);
        Ok(())
    });
    area.check("ioctls that do not exist: ENOTTY", || {
        let port = Port::open(0)?;
        // Other numbers of the magic; known numbers with another size or direction; others.
        for request in [
            0x1b00,
            0x1b04,
            0x1b05,
            0x1bff,
            0xc020_1b01,
            0xc01c_1b04,
            0x801c_1b01,
            0x401c_1b01,
            0xc004_1b02,
            0x4008_1b02,
            0x4004_1b03,
            0xc02c_1b04,
            0x5401,
            0x541b,
            0,
            u32::MAX,
        ] {
            let got = selftests::calls::ioctl_null(port.as_fd(), request);
            ensure_errno!(got, ENOTTY, "{request:#x}");
        }
        Ok(())
    });
    area.check(
        "splice() and sendfile() out of a port: EINVAL, the packet stays",
        || {
            let (peers, tids) = queued(1)?;
            let (pipe_out, pipe_in) = nix::unistd::pipe()?;
            let flags = SpliceFFlags::empty();
            let got = splice(&peers.b.port, None, &pipe_in, None, PACKET, flags);
            ensure_errno!(got, EINVAL);
            let null = std::fs::File::options().write(true).open("/dev/null")?;
            ensure_errno!(sendfile(&null, &peers.b.port, None, PACKET), EINVAL);
            drop(pipe_out);
            ensure_eq!(peers.b.recv()?.tid()?.low(), tids[0]);
            Ok(())
        },
    );
    area.check(
        "splice() and sendfile() into a port: EINVAL, nothing is sent",
        || {
            let peers = Peers::new()?;
            let bytes = peers
                .a
                .packet(&peers.b, Method::SEND, fresh_tid())
                .to_bytes(Layout::New);
            let (pipe_out, pipe_in) = nix::unistd::pipe()?;
            nix::unistd::write(&pipe_in, &bytes)?;
            let flags = SpliceFFlags::empty();
            let got = splice(&pipe_out, None, &peers.a.port, None, PACKET, flags);
            ensure_errno!(got, EINVAL);
            let path = "/tmp/umad-readv";
            std::fs::write(path, &bytes)?;
            let file = std::fs::File::open(path)?;
            let got = sendfile(&peers.a.port, &file, None, PACKET);
            std::fs::remove_file(path)?;
            ensure_errno!(got, EINVAL);
            peers.b.nothing_comes()
        },
    );
    area.check(
        "fsync() and ftruncate(): EINVAL; fstat() shows the device",
        || {
            let port = Port::open(0)?;
            ensure_errno!(nix::unistd::fsync(&port), EINVAL);
            ensure_errno!(nix::unistd::ftruncate(&port, 0), EINVAL);
            let stat = nix::sys::stat::fstat(&port)?;
            ensure_eq!(nix::sys::stat::major(stat.st_rdev), 231);
            ensure_eq!(nix::sys::stat::minor(stat.st_rdev), 0);
            Ok(())
        },
    );
    area.check("reading moves no file position", || {
        let (peers, _) = queued(2)?;
        let position = || -> Outcome<String> {
            use std::os::fd::AsRawFd;
            let path = format!("/proc/self/fdinfo/{}", peers.b.port.as_raw_fd());
            let text = std::fs::read_to_string(path)?;
            Ok(text.lines().next().unwrap_or_default().to_owned())
        };
        ensure_eq!(position()?, "pos:\t0");
        peers.b.port.recv_timeout(SOON)?;
        ensure_eq!(position()?, "pos:\t0");
        Ok(())
    });
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("readv");
    readv_checks(&mut area);
    writev_checks(&mut area);
    other_calls(&mut area);
    area.run()
}

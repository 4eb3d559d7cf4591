// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Area `libibumad`: the distribution's libibumad as a client of the module.
//!
//! It is linked as any C program links it; what it makes of the kernel's answers is part of what
//! is looked at.

use std::ffi::{c_char, c_int, c_long, c_void, CStr, CString};

use ktap::peers::{CLASS, OUI, SOON};
use ktap::prelude::*;
use selftests::task::MUST;

/// `struct umad_reg_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct RegAttr {
    mgmt_class: u8,
    mgmt_class_version: u8,
    flags: u32,
    method_mask: [u64; 2],
    oui: u32,
    rmpp_version: u8,
}

/// `long method_mask[16 / sizeof(long)]`
type MaskOfLongs = [c_long; 16 / size_of::<c_long>()];

#[link(name = "ibumad")]
extern "C" {
    fn umad_init() -> c_int;
    fn umad_done() -> c_int;
    fn umad_get_cas_names(cas: *mut [c_char; 20], max: c_int) -> c_int;
    fn umad_open_port(ca_name: *const c_char, portnum: c_int) -> c_int;
    fn umad_close_port(fd: c_int) -> c_int;
    fn umad_get_issm_path(
        ca_name: *const c_char,
        portnum: c_int,
        path: *mut c_char,
        max: c_int,
    ) -> c_int;
    fn umad_size() -> usize;
    fn umad_get_mad(umad: *mut c_void) -> *mut c_void;
    fn umad_status(umad: *mut c_void) -> c_int;
    fn umad_set_addr(umad: *mut c_void, lid: c_int, qp: c_int, sl: c_int, qkey: c_int) -> c_int;
    fn umad_set_grh(umad: *mut c_void, addr: *mut c_void) -> c_int;
    fn umad_set_pkey(umad: *mut c_void, pkey_index: c_int) -> c_int;
    fn umad_send(
        fd: c_int,
        agent: c_int,
        umad: *mut c_void,
        length: c_int,
        timeout_ms: c_int,
        retries: c_int,
    ) -> c_int;
    fn umad_recv(fd: c_int, umad: *mut c_void, length: *mut c_int, timeout_ms: c_int) -> c_int;
    fn umad_poll(fd: c_int, timeout_ms: c_int) -> c_int;
    fn umad_get_fd(fd: c_int) -> c_int;
    fn umad_register(
        fd: c_int,
        class: c_int,
        version: c_int,
        rmpp_version: u8,
        mask: *mut MaskOfLongs,
    ) -> c_int;
    fn umad_register_oui(
        fd: c_int,
        class: c_int,
        rmpp_version: u8,
        oui: *mut [u8; 3],
        mask: *mut MaskOfLongs,
    ) -> c_int;
    fn umad_register2(fd: c_int, attr: *mut RegAttr, agent: *mut u32) -> c_int;
    fn umad_unregister(fd: c_int, agent: c_int) -> c_int;
}

/// What libibumad answers where it fails: a negative errno.
fn answer(code: c_int) -> nix::Result<c_int> {
    if code < 0 {
        return Err(Errno::from_raw(-code));
    }
    Ok(code)
}

/// A port that libibumad has open.
struct Lib {
    fd: c_int,
}

/// A buffer of libibumad: header and MAD.
struct Buffer(Vec<u64>);

impl Buffer {
    fn new(mad_len: usize) -> Self {
        // SAFETY: takes nothing; a constant of the library.
        let header = unsafe { umad_size() };
        Self(vec![0; (header + mad_len).div_ceil(8)])
    }

    fn pointer(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().cast()
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn status(&mut self) -> c_int {
        // SAFETY: the buffer holds a whole header.
        unsafe { umad_status(self.pointer()) }
    }

    /// The packet, of a buffer in the layout of 64 bytes.
    fn packet(&self, mad_len: usize) -> Outcome<Packet> {
        let bytes = self.bytes();
        Ok(Packet::from_bytes(&bytes[..64 + mad_len], Layout::New)?)
    }

    /// A MAD to a GID, addressed by the library's own functions.
    fn to(gid: Gid, mad: &[u8]) -> Outcome<Self> {
        let mut buffer = Self::new(mad.len());
        // `ib_mad_addr_t`, of which umad_set_grh reads the fields of the GRH.
        let mut address = [0u8; 44];
        address[12] = 1; // grh_present
        address[14] = 64; // hop limit
        address[16..32].copy_from_slice(&gid.0);
        let umad = buffer.pointer();
        let qkey = i32::from_ne_bytes(Address::GSI_QKEY.to_ne_bytes());
        // SAFETY: `umad` points to a whole header with room for the MAD behind it, `address` to a
        // whole address; both outlive the calls. The MAD's place is `mad.len()` bytes long.
        unsafe {
            umad_set_addr(umad, 0, 1, 0, qkey);
            umad_set_grh(umad, address.as_mut_ptr().cast());
            umad_set_pkey(umad, 0);
            let place = umad_get_mad(umad).cast::<u8>();
            std::ptr::copy_nonoverlapping(mad.as_ptr(), place, mad.len());
        }
        Ok(buffer)
    }
}

impl Lib {
    fn open(ibdev: &str) -> Outcome<Self> {
        // SAFETY: takes nothing.
        answer(unsafe { umad_init() })?;
        Ok(Self {
            fd: Self::try_open(ibdev, 1)?,
        })
    }

    fn try_open(ibdev: &str, port: c_int) -> Outcome<c_int> {
        let name = CString::new(ibdev)?;
        // SAFETY: a text that ends with NUL.
        Ok(answer(unsafe { umad_open_port(name.as_ptr(), port) })?)
    }

    fn register(&self, class: u8, methods: &[Method]) -> nix::Result<c_int> {
        let mut mask = longs(methods);
        // SAFETY: the mask outlives the call.
        answer(unsafe { umad_register(self.fd, class.into(), 1, 0, &mut mask) })
    }

    fn register_oui(&self, class: u8, rmpp: u8, methods: &[Method]) -> nix::Result<c_int> {
        let mut mask = longs(methods);
        let [_, a, b, c] = OUI.to_be_bytes();
        let mut oui = [a, b, c];
        // SAFETY: OUI and mask outlive the call.
        answer(unsafe { umad_register_oui(self.fd, class.into(), rmpp, &mut oui, &mut mask) })
    }

    /// umad_register2 answers with a positive errno.
    fn register2(&self, attr: &mut RegAttr) -> nix::Result<u32> {
        let mut agent = u32::MAX;
        // SAFETY: attributes and id outlive the call.
        match unsafe { umad_register2(self.fd, attr, &mut agent) } {
            0 => Ok(agent),
            errno => Err(Errno::from_raw(errno)),
        }
    }

    fn unregister(&self, agent: c_int) -> nix::Result<()> {
        // SAFETY: takes numbers only.
        answer(unsafe { umad_unregister(self.fd, agent) }).map(drop)
    }

    fn send(
        &self,
        agent: c_int,
        buffer: &mut Buffer,
        len: usize,
        timeout: c_int,
    ) -> Outcome<nix::Result<()>> {
        let len = c_int::try_from(len)?;
        // SAFETY: the buffer holds a header and a MAD of `len` bytes.
        let code = unsafe { umad_send(self.fd, agent, buffer.pointer(), len, timeout, 0) };
        Ok(answer(code).map(drop))
    }

    /// umad_recv: agent and length of the MAD, or errno and length.
    fn recv(
        &self,
        buffer: &mut Buffer,
        room: usize,
        timeout: c_int,
    ) -> Outcome<(nix::Result<c_int>, c_int)> {
        let mut len = c_int::try_from(room)?;
        // SAFETY: the buffer holds a header and `room` bytes behind it; `len` outlives the call.
        let code = unsafe { umad_recv(self.fd, buffer.pointer(), &mut len, timeout) };
        Ok((answer(code), len))
    }

    fn poll(&self, timeout: c_int) -> nix::Result<()> {
        // SAFETY: takes numbers only.
        answer(unsafe { umad_poll(self.fd, timeout) }).map(drop)
    }
}

impl Drop for Lib {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this value's own.
        unsafe {
            umad_close_port(self.fd);
            umad_done();
        }
    }
}

/// The mask that umad_register takes: bit n of an array of longs.
fn longs(methods: &[Method]) -> MaskOfLongs {
    let mut mask = MaskOfLongs::default();
    for method in methods {
        let bit = usize::from(method.0);
        let width = usize::try_from(c_long::BITS).unwrap_or(usize::MAX);
        mask[bit / width] |= 1 << (bit % width);
    }
    mask
}

/// Milliseconds of a bound.
fn millis(bound: Duration) -> c_int {
    c_int::try_from(bound.as_millis()).unwrap_or(c_int::MAX)
}

const USUAL: [Method; 3] = [Method::GET, Method::SET, Method::SEND];

/// A plain agent of ours, on the other port.
fn peer() -> Outcome<Endpoint> {
    Endpoint::open("rxe1", Layout::New, &Peers::registration(CLASS).rmpp(1))
}

fn vendor_mad(method: Method, tid: Tid) -> Vec<u8> {
    VendorMad::new(CLASS, OUI, method, tid).into_bytes()
}

fn opening(area: &mut ktap::Area) {
    area.check(
        "umad_init finds the module, and the devices are listed",
        || {
            // SAFETY: takes nothing.
            answer(unsafe { umad_init() })?;
            let mut names = [[0; 20]; 16];
            // SAFETY: room for 16 names of 20 bytes each.
            let count = answer(unsafe { umad_get_cas_names(names.as_mut_ptr(), 16) })?;
            let names: Vec<String> = names[..usize::try_from(count)?]
                .iter()
                .map(|name| {
                    // SAFETY: the library ends each name with NUL.
                    let text = unsafe { CStr::from_ptr(name.as_ptr()) };
                    text.to_string_lossy().into_owned()
                })
                .collect();
            for ibdev in ["rxe0", "rxe1"] {
                ensure!(names.iter().any(|name| name == ibdev), "{names:?}");
            }
            Ok(())
        },
    );
    area.check(
        "a port is opened by name, non-blocking, and umad_get_fd is its file",
        || {
            let lib = Lib::open("rxe0")?;
            // SAFETY: takes a number only.
            let fd = unsafe { umad_get_fd(lib.fd) };
            ensure_eq!(fd, lib.fd);
            let link = std::fs::read_link(format!("/proc/self/fd/{fd}"))?;
            ensure_eq!(link.to_string_lossy(), "/dev/infiniband/umad0");
            let mut buffer = Buffer::new(256);
            let (got, _) = lib.recv(&mut buffer, 256, 0)?;
            ensure_errno!(got, EWOULDBLOCK);
            Ok(())
        },
    );
    area.check(
        "a port that the device has not, and a device that nobody has, fail",
        || {
            let _lib = Lib::open("rxe0")?;
            ensure!(Lib::try_open("rxe0", 2).is_err());
            ensure!(Lib::try_open("nobody", 1).is_err());
            Ok(())
        },
    );
    area.check("the path of issm is made of the same number", || {
        let _lib = Lib::open("rxe1")?;
        let mut path = [0; 256];
        // SAFETY: room for 256 bytes, and a text that ends with NUL.
        answer(unsafe { umad_get_issm_path(c"rxe1".as_ptr(), 1, path.as_mut_ptr(), 256) })?;
        // SAFETY: the library ends the path with NUL.
        let path = unsafe { CStr::from_ptr(path.as_ptr()) };
        ensure_eq!(path, c"/dev/infiniband/issm1");
        Ok(())
    });
    area.check("a port that is closed is free again", || {
        let lib = Lib::open("rxe0")?;
        lib.register(0x0a, &USUAL)?;
        drop(lib);
        Lib::open("rxe0")?.register(0x0a, &USUAL)?;
        Ok(())
    });
}

fn registering(area: &mut ktap::Area) {
    area.check("umad_register gives ids from 0 on", || {
        let lib = Lib::open("rxe0")?;
        ensure_eq!(lib.register(0x0a, &USUAL)?, 0);
        ensure_eq!(lib.register(0x0b, &USUAL)?, 1);
        lib.unregister(0)?;
        ensure_eq!(lib.register(0x0c, &USUAL)?, 0);
        Ok(())
    });
    area.check("umad_register makes EPERM of every refusal", || {
        let lib = Lib::open("rxe0")?;
        lib.register(0x0a, &USUAL)?;
        // Taken; subnet management on a port without QP 0.
        ensure_errno!(lib.register(0x0a, &USUAL), EPERM);
        ensure_errno!(lib.register(0x01, &[]), EPERM);
        ensure_errno!(lib.register(0x81, &[]), EPERM);
        Ok(())
    });
    area.check("umad_register_oui: a vendor's class", || {
        let lib = Lib::open("rxe0")?;
        ensure_eq!(lib.register_oui(CLASS, 1, &USUAL)?, 0);
        ensure_errno!(lib.register_oui(CLASS, 1, &USUAL), EPERM);
        ensure_eq!(lib.register_oui(0x31, 0, &USUAL)?, 1);
        Ok(())
    });
    area.check("umad_register2 tells the errno", || {
        let lib = Lib::open("rxe0")?;
        let mut attr = RegAttr {
            mgmt_class: CLASS,
            mgmt_class_version: 1,
            method_mask: [0b1110, 0],
            oui: OUI,
            rmpp_version: 1,
            ..RegAttr::default()
        };
        ensure_eq!(lib.register2(&mut attr)?, 0);
        ensure_errno!(lib.register2(&mut attr), EINVAL);
        attr.mgmt_class = 0x01;
        attr.rmpp_version = 0;
        attr.method_mask = [0, 0];
        ensure_errno!(lib.register2(&mut attr), EPROTONOSUPPORT);
        Ok(())
    });
    area.check("umad_register2 with unknown flags: EINVAL", || {
        let lib = Lib::open("rxe0")?;
        let mut attr = RegAttr {
            mgmt_class: CLASS,
            mgmt_class_version: 1,
            flags: 0x100,
            oui: OUI,
            ..RegAttr::default()
        };
        ensure_errno!(lib.register2(&mut attr), EINVAL);
        // The kernel writes the known flags back; the library takes EINVAL for a kernel that knows
        // none, and tells that.
        ensure_eq!(attr.flags, 0);
        Ok(())
    });
    area.check(
        "umad_register2 for an agent that does RMPP by itself",
        || {
            let lib = Lib::open("rxe0")?;
            let mut attr = RegAttr {
                mgmt_class: CLASS,
                mgmt_class_version: 1,
                flags: umad::abi::USER_RMPP,
                oui: OUI,
                rmpp_version: 1,
                ..RegAttr::default()
            };
            ensure_eq!(lib.register2(&mut attr)?, 0);
            Ok(())
        },
    );
    area.check("the 33rd agent: ENOMEM", || {
        let lib = Lib::open("rxe0")?;
        let mut attr = RegAttr {
            mgmt_class: CLASS,
            mgmt_class_version: 1,
            oui: OUI,
            ..RegAttr::default()
        };
        for id in 0..32 {
            ensure_eq!(lib.register2(&mut attr)?, id);
        }
        ensure_errno!(lib.register2(&mut attr), ENOMEM);
        Ok(())
    });
    area.check(
        "umad_unregister of ids that nobody has fails, and harms nobody",
        || {
            let lib = Lib::open("rxe0")?;
            lib.register(0x0a, &USUAL)?;
            for agent in [1, 31, 32, 1_000_000, -1] {
                ensure!(lib.unregister(agent).is_err(), "agent {agent}");
            }
            lib.unregister(0)?;
            Ok(())
        },
    );
}

fn moving(area: &mut ktap::Area) {
    area.check("umad_send and umad_recv: a request and its answer", || {
        let (lib, peer) = (Lib::open("rxe0")?, peer()?);
        let agent = lib.register_oui(CLASS, 1, &USUAL)?;
        let tid = fresh_tid();
        let mut request = Buffer::to(peer.gid, &vendor_mad(Method::GET, tid))?;
        lib.send(agent, &mut request, 256, millis(SOON))??;
        let got = peer.recv_tid(tid)?;
        peer.port.send(&peer.response(&got)?)?;
        lib.poll(millis(MUST))?;
        let mut answer = Buffer::new(256);
        let (from, len) = lib.recv(&mut answer, 256, millis(MUST))?;
        ensure_eq!((from?, len), (agent, 256));
        ensure_eq!(answer.status(), 0);
        let packet = answer.packet(256)?;
        ensure_eq!(packet.tid()?.low(), tid.low());
        ensure_eq!(packet.mad_header()?.method, Method::GET_RESP);
        Ok(())
    });
    area.check(
        "umad_recv gets what the peer sends, with its address",
        || {
            let (lib, peer) = (Lib::open("rxe0")?, peer()?);
            let agent = lib.register_oui(CLASS, 1, &USUAL)?;
            let to = Address::roce(umad::sysfs::gid("rxe0", 1, 0)?, 0);
            let tid = fresh_tid();
            let packet = Packet::new(peer.agent, &to, vendor_mad(Method::SEND, tid));
            peer.port.send(&packet)?;
            let mut buffer = Buffer::new(256);
            let (from, len) = lib.recv(&mut buffer, 256, millis(MUST))?;
            ensure_eq!((from?, len), (agent, 256));
            let got = buffer.packet(256)?;
            ensure_eq!(got.tid()?.low(), tid.low());
            ensure_eq!(got.address().grh.map(|grh| grh.gid), Some(peer.gid));
            ensure_eq!(got.address().qpn, Qpn::GSI);
            Ok(())
        },
    );
    area.check(
        "a request that times out: umad_status says ETIMEDOUT",
        || {
            let (lib, peer) = (Lib::open("rxe0")?, peer()?);
            let agent = lib.register_oui(CLASS, 1, &USUAL)?;
            let tid = fresh_tid();
            let mut request = Buffer::to(peer.gid, &vendor_mad(Method::GET, tid))?;
            lib.send(agent, &mut request, 256, 50)??;
            let mut buffer = Buffer::new(256);
            let (from, len) = lib.recv(&mut buffer, 256, millis(MUST))?;
            // The library tells the length field, which is what the sender left in it, less a header.
            ensure_eq!(from?, agent);
            ensure!(len <= 256, "length {len}");
            ensure_eq!(buffer.status(), libc::ETIMEDOUT);
            ensure_eq!(buffer.packet(24)?.tid()?.low(), tid.low());
            Ok(())
        },
    );
    area.check(
        "a message that is too long: ENOSPC and its length, then all of it",
        || {
            let (lib, peer) = (Lib::open("rxe0")?, peer()?);
            let agent = lib.register_oui(CLASS, 1, &USUAL)?;
            let payload: Vec<u8> = (0u8..=250).cycle().take(2000).collect();
            let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid())
                .rmpp()
                .payload(&payload);
            let to = Address::roce(umad::sysfs::gid("rxe0", 1, 0)?, 0);
            let message = Packet::new(peer.agent, &to, mad.into_bytes());
            peer.port.send(&message.timeout(Duration::from_secs(10)))?;
            let mut small = Buffer::new(256);
            let (got, len) = lib.recv(&mut small, 256, millis(MUST))?;
            ensure_errno!(got, ENOSPC);
            ensure!(len >= 2040, "length {len}");
            let room = usize::try_from(len)?;
            let mut large = Buffer::new(room);
            let (from, again) = lib.recv(&mut large, room, millis(MUST))?;
            ensure_eq!((from?, again), (agent, len));
            ensure_eq!(large.packet(2040)?.mad[40..], payload[..]);
            Ok(())
        },
    );
    area.check("umad_send of a long message arrives whole", || {
        let (lib, peer) = (Lib::open("rxe0")?, peer()?);
        let agent = lib.register_oui(CLASS, 1, &USUAL)?;
        let payload: Vec<u8> = (0u8..=250).cycle().take(10_000).collect();
        let mad = VendorMad::new(CLASS, OUI, Method::SEND, fresh_tid())
            .rmpp()
            .payload(&payload)
            .into_bytes();
        let mut buffer = Buffer::to(peer.gid, &mad)?;
        lib.send(agent, &mut buffer, mad.len(), millis(SOON))??;
        let got = peer.recv()?;
        ensure_eq!(got.mad[40..10_040], payload[..]);
        Ok(())
    });
    area.check(
        "umad_send by an agent that nobody has: EIO; of half a header: EIO",
        || {
            let (lib, peer) = (Lib::open("rxe0")?, peer()?);
            let mut request = Buffer::to(peer.gid, &vendor_mad(Method::SEND, fresh_tid()))?;
            // The library makes EIO of whatever write() says.
            ensure_errno!(lib.send(3, &mut request, 256, 0)?, EIO);
            let agent = lib.register_oui(CLASS, 1, &USUAL)?;
            ensure_errno!(lib.send(agent, &mut request, 20, 0)?, EIO);
            peer.nothing_comes()
        },
    );
    area.check(
        "umad_poll and umad_recv without packets: ETIMEDOUT, EWOULDBLOCK",
        || {
            let lib = Lib::open("rxe0")?;
            lib.register_oui(CLASS, 1, &USUAL)?;
            ensure_errno!(lib.poll(50), ETIMEDOUT);
            let mut buffer = Buffer::new(256);
            let (got, _) = lib.recv(&mut buffer, 256, 50)?;
            ensure_errno!(got, ETIMEDOUT);
            let (got, _) = lib.recv(&mut buffer, 256, 0)?;
            ensure_errno!(got, EWOULDBLOCK);
            Ok(())
        },
    );
    area.check(
        "after the unplug: umad_poll finds it ready, umad_recv EIO, umad_send EIO",
        || {
            let pair = RxePair::plain("lb")?;
            pair.a.plug()?;
            let lib = Lib::open(&pair.a.ibdev)?;
            let agent = lib.register_oui(CLASS, 1, &USUAL)?;
            pair.a.unplug()?;
            lib.poll(millis(MUST))?;
            let mut buffer = Buffer::new(256);
            let (got, _) = lib.recv(&mut buffer, 256, millis(MUST))?;
            ensure_errno!(got, EIO);
            let gid = umad::sysfs::gid("rxe1", 1, 0)?;
            let mut request = Buffer::to(gid, &vendor_mad(Method::SEND, fresh_tid()))?;
            ensure_errno!(lib.send(agent, &mut request, 256, 0)?, EIO);
            ensure_errno!(lib.register(0x0b, &USUAL), EPERM);
            Ok(())
        },
    );
}

fn main() -> std::process::ExitCode {
    let mut area = ktap::Area::new("libibumad");
    opening(&mut area);
    registering(&mut area);
    moving(&mut area);
    area.run()
}

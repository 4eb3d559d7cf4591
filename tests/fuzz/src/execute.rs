// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! Makes the calls of a program.

use std::fs::{self, File};
use std::io;
use std::mem::size_of;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use umad::abi;

use crate::call::{Call, Op};
use crate::field::{Field, FILES, LAST_TID};
use crate::mad;
use crate::memory::{Manner, Memory, ROOM};
use crate::scene::Scene;
use crate::syscall32;
use crate::timer::Timer;

/// What a call returned: a value, or an errno, which is negative.
pub type Result = i64;

/// An open file of a program.
struct Slot {
    fd: AtomicI32,
    new_layout: AtomicBool,
}

/// What the threads of a program share.
pub struct Shared<'a> {
    /// The devices.
    pub scene: &'a Scene,
    slots: [Slot; FILES],
    last_tid: AtomicU64,
}

impl<'a> Shared<'a> {
    /// No file is open.
    pub fn new(scene: &'a Scene) -> Self {
        let slot = || Slot {
            fd: AtomicI32::new(-1),
            new_layout: AtomicBool::new(false),
        };
        Self {
            scene,
            slots: std::array::from_fn(|_| slot()),
            last_tid: AtomicU64::new(0),
        }
    }

    /// Ends a program: all files are closed, all devices as they were.
    pub fn end(&self) -> ktap::Outcome {
        for slot in &self.slots {
            close(slot.fd.swap(-1, Ordering::Relaxed));
        }
        self.last_tid.store(0, Ordering::Relaxed);
        self.scene.restore()
    }

    fn slot(&self, call: &Call, field: Field) -> &Slot {
        &self.slots[usize::try_from(call.get(field)).unwrap_or(0) % self.slots.len()]
    }
}

/// A thread that makes calls.
pub struct Thread<'a> {
    shared: &'a Shared<'a>,
    memory: Memory,
    timer: Timer,
    fail_nth: Option<File>,
    fail_next: u64,
    away: bool,
}

impl<'a> Thread<'a> {
    /// The calling thread.
    pub fn new(shared: &'a Shared<'a>) -> nix::Result<Self> {
        Ok(Self {
            shared,
            memory: Memory::new()?,
            timer: Timer::new()?,
            fail_nth: File::options()
                .read(true)
                .write(true)
                .open("/proc/thread-self/fail-nth")
                .ok(),
            fail_next: 0,
            away: false,
        })
    }

    /// The thread's part of the end of a program.
    pub fn end(&mut self) {
        self.fail_next = 0;
        if std::mem::take(&mut self.away) {
            let _ = self.shared.scene.go(false);
        }
    }

    /// Makes a call.
    pub fn run(&mut self, call: &Call) -> Result {
        let mut result = self.make(call);
        // Which number a file has is not of interest.
        if matches!(call.op, Op::Open | Op::Dup) {
            result = result.min(0);
        }
        if call.op != Op::Fail {
            self.fail_next = 0;
        }
        result
    }

    fn make(&mut self, call: &Call) -> Result {
        let slot = self.shared.slot(call, Field::File);
        let fd = slot.fd.load(Ordering::Relaxed);
        match call.op {
            Op::Open => self.open(call, slot),
            Op::Register => self.register(call, slot, fd),
            Op::Unregister => {
                let id = low(call.get(Field::Id)).to_ne_bytes();
                match self.memory.put(&id, manner(call)) {
                    Ok(at) => self.ioctl(call, fd, abi::UNREGISTER_AGENT, at),
                    Err(e) => of_io(&e),
                }
            }
            Op::EnablePkey => {
                let result = self.ioctl(call, fd, abi::ENABLE_PKEY, 0);
                if result == 0 {
                    slot.new_layout.store(true, Ordering::Relaxed);
                }
                result
            }
            Op::Ioctl => self.ioctl(
                call,
                fd,
                low(call.get(Field::Command)),
                call.get(Field::Argument),
            ),
            Op::Write => self.write(call, slot, fd),
            Op::Read => self.read(call, slot, fd),
            Op::Poll => self.poll(call, fd),
            Op::Mmap => self.mmap(call, fd),
            Op::Splice => self.through_pipe(call, |pipe, len| {
                let [from, to] = if call.get(Field::Direction) == 0 {
                    [fd, pipe[1]]
                } else {
                    [pipe[0], fd]
                };
                // SAFETY: no memory of ours is involved.
                unsafe {
                    libc::splice(
                        from,
                        std::ptr::null_mut(),
                        to,
                        std::ptr::null_mut(),
                        len,
                        libc::SPLICE_F_NONBLOCK,
                    )
                }
            }),
            Op::Sendfile => self.through_pipe(call, |pipe, len| {
                let [from, to] = if call.get(Field::Direction) == 0 {
                    [fd, pipe[1]]
                } else {
                    [pipe[0], fd]
                };
                // SAFETY: no memory of ours is involved.
                unsafe { libc::sendfile(to, from, std::ptr::null_mut(), len) }
            }),
            // SAFETY: no memory of ours is involved.
            Op::Lseek => self.counted(|| unsafe {
                libc::lseek(fd, signed(call.get(Field::Offset)), libc::SEEK_SET)
            }),
            Op::Fcntl => self.fcntl(call, fd),
            Op::Dup => {
                // SAFETY: a new descriptor, which the program owns from now on.
                let result = self.counted(|| i64::from(unsafe { libc::dup(fd) }));
                if let Ok(new) = i32::try_from(result) {
                    if new >= 0 {
                        let other = self.shared.slot(call, Field::Other);
                        other
                            .new_layout
                            .store(slot.new_layout.load(Ordering::Relaxed), Ordering::Relaxed);
                        close(other.fd.swap(new, Ordering::Relaxed));
                    }
                }
                result
            }
            Op::Fork => self.fork(call, fd),
            Op::Close => {
                let fd = slot.fd.swap(-1, Ordering::Relaxed);
                // SAFETY: the program owns it, and nobody else will use it.
                self.counted(|| i64::from(unsafe { libc::close(fd) }))
            }
            Op::Sleep => {
                std::thread::sleep(Duration::from_millis(call.get(Field::Ms)));
                0
            }
            Op::Netns => {
                self.away = call.get(Field::Where) == 1;
                self.shared
                    .scene
                    .go(self.away)
                    .map_or_else(of_errno, |()| 0)
            }
            Op::Unplug => {
                // What was sent before, and is answered by ib_mad itself, is to be done.
                std::thread::sleep(Duration::from_millis(20));
                self.shared
                    .scene
                    .unplug(call.get(Field::Device))
                    .map_or(-1, i64::from)
            }
            Op::Plug => {
                let scene = self.shared.scene;
                self.counted(|| scene.plug(call.get(Field::Device)).map_or(-1, |()| 0))
            }
            Op::Fault => {
                let (kind, n) = (call.get(Field::Fault), call.get(Field::Count));
                self.shared
                    .scene
                    .fault(call.get(Field::Device), kind, n)
                    .map_or(-1, |()| 0)
            }
            Op::Port => {
                let change = self
                    .shared
                    .scene
                    .change(call.get(Field::Device), call.get(Field::Change));
                change.map_or(-1, |()| 0)
            }
            Op::Look => self.look(call, fd),
            Op::Chardev => {
                let asked = self
                    .shared
                    .scene
                    .chardev(call.get(Field::Device), call.get(Field::Node) == 1);
                asked.map_or_else(of_errno, |()| 0)
            }
            Op::Fail => {
                self.fail_next = call.get(Field::Count);
                0
            }
        }
    }

    // Makes a system call, with the failure that the program has asked for.
    fn counted(&mut self, call: impl FnOnce() -> i64) -> Result {
        let nth = std::mem::take(&mut self.fail_next);
        let armed = match &self.fail_nth {
            Some(file) if nth > 0 => file
                .write_all_at(nth.to_string().as_bytes(), 0)
                .is_ok()
                .then_some(file),
            _ => None,
        };
        let result = call();
        let result = if result == -1 {
            of_errno(Errno::last())
        } else {
            result
        };
        if let Some(file) = armed {
            // The copying of this very write could be what fails; then it is over, too.
            if file.write_all_at(b"0", 0).is_err() {
                let _ = file.write_all_at(b"0", 0);
            }
        }
        result
    }

    // A call that may sleep for ever: a signal comes after a moment, and again until it returns.
    fn interrupted(&mut self, may_sleep: bool, call: impl FnOnce() -> i64) -> Result {
        if !may_sleep {
            return self.counted(call);
        }
        self.timer.start();
        let result = self.counted(call);
        self.timer.stop();
        result
    }

    fn open(&mut self, call: &Call, slot: &Slot) -> Result {
        let number = self.shared.scene.umad(call.get(Field::Device));
        let issm = call.get(Field::Node) == 1;
        let wait = call.get(Field::Wait) == 1;
        let path = format!(
            "/dev/infiniband/{}{number}\0",
            if issm { "issm" } else { "umad" }
        );
        let flags = libc::O_RDWR | libc::O_CLOEXEC | if wait { 0 } else { libc::O_NONBLOCK };
        let result = self.interrupted(issm && wait, || {
            // SAFETY: the path ends with a zero.
            let fd = unsafe { libc::open(path.as_ptr().cast(), flags) };
            fd.into()
        });
        if let Ok(fd) = i32::try_from(result) {
            if fd >= 0 {
                slot.new_layout.store(false, Ordering::Relaxed);
                close(slot.fd.swap(fd, Ordering::Relaxed));
            }
        }
        result
    }

    fn ioctl(&mut self, call: &Call, fd: i32, command: u32, argument: u64) -> Result {
        if call.get(Field::Abi) == 1 {
            // It says its errno by itself.
            let mut result = 0;
            self.counted(|| {
                result = syscall32::ioctl(fd, command, low(argument));
                0
            });
            return result;
        }
        // SAFETY: the argument points to memory that nobody has a reference to, or to nothing; what takes none ignores it.
        self.counted(|| i64::from(unsafe { libc::ioctl(fd, libc::Ioctl::from(command), argument) }))
    }

    fn register(&mut self, call: &Call, slot: &Slot, fd: i32) -> Result {
        let second = call.get(Field::Request) == 1;
        let (command, bytes) = match second {
            true => (abi::REGISTER_AGENT2, mad::request2(call)),
            false => (abi::REGISTER_AGENT, mad::request(call)),
        };
        let result = match self.memory.put(&bytes, manner(call)) {
            Ok(at) => self.ioctl(call, fd, command, at),
            Err(e) => of_io(&e),
        };
        if result == 0 && second {
            slot.new_layout.store(true, Ordering::Relaxed);
        }
        result
    }

    fn write(&mut self, call: &Call, slot: &Slot, fd: i32) -> Result {
        let new = match call.get(Field::Header) {
            1 => false,
            2 => true,
            _ => slot.new_layout.load(Ordering::Relaxed),
        };
        let tid = match call.get(Field::Tid) {
            LAST_TID => self.shared.last_tid.load(Ordering::Relaxed),
            tid => tid,
        };
        let bytes = mad::packet(call, self.shared.scene, new, tid);
        let at = match self.memory.put(&bytes, manner(call)) {
            Ok(at) => at,
            Err(e) => return of_io(&e),
        };
        let how = call.get(Field::Write);
        // SAFETY: the kernel reads what is there, and checks what is not.
        self.counted(|| unsafe {
            match how {
                1 => libc::writev(fd, halves(at, bytes.len()).as_ptr(), 2),
                2 => libc::pwrite(fd, pointer(at), bytes.len(), 0),
                _ => libc::write(fd, pointer(at), bytes.len()),
            }
        } as i64)
    }

    fn read(&mut self, call: &Call, slot: &Slot, fd: i32) -> Result {
        let manner = manner(call);
        let len = usize::try_from(call.get(Field::Room))
            .unwrap_or(ROOM)
            .min(ROOM);
        let at = self.memory.room(len, manner);
        // SAFETY: no memory of ours is involved.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        let how = call.get(Field::Read);
        // SAFETY: the kernel writes to memory that nobody has a reference to, and checks it.
        let result = self.interrupted(flags & libc::O_NONBLOCK == 0, || unsafe {
            match how {
                1 => libc::readv(fd, halves(at, len).as_ptr(), 2),
                2 => libc::pread(fd, pointer(at).cast_mut(), len, 0),
                _ => libc::read(fd, pointer(at).cast_mut(), len),
            }
        } as i64);
        let header = mad::header_len(slot.new_layout.load(Ordering::Relaxed));
        if result >= i64::try_from(header + 16).unwrap_or(0) && manner == Manner::Good {
            let mut bytes = [0; 80];
            if self.memory.get(&mut bytes).is_ok() {
                if let Some(tid) = bytes
                    .get(header + 8..header + 16)
                    .and_then(|tid| tid.try_into().ok())
                {
                    self.shared
                        .last_tid
                        .store(u64::from_be_bytes(tid), Ordering::Relaxed);
                }
            }
        }
        result
    }

    fn poll(&mut self, call: &Call, fd: i32) -> Result {
        let events = u16::try_from(call.get(Field::Events) & 0xffff).unwrap_or(0);
        let ms = i32::try_from(call.get(Field::Ms)).unwrap_or(0).min(50);
        if call.get(Field::Poll) == 0 {
            let mut fds = libc::pollfd {
                fd,
                events: i16::from_ne_bytes(events.to_ne_bytes()),
                revents: 0,
            };
            // SAFETY: one structure, which outlives the call.
            return self.counted(|| i64::from(unsafe { libc::poll(&raw mut fds, 1, ms) }));
        }
        let mut event = libc::epoll_event {
            events: events.into(),
            u64: 0,
        };
        // SAFETY: the structures outlive the calls; the descriptor is closed by who made it.
        self.counted(|| unsafe {
            let epoll = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            let mut result = libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event);
            if result == 0 {
                result = libc::epoll_wait(epoll, &raw mut event, 1, ms);
            }
            let errno = Errno::last();
            close(epoll);
            errno.set();
            result.into()
        })
    }

    fn mmap(&mut self, call: &Call, fd: i32) -> Result {
        let protection = i32::try_from(call.get(Field::Protection)).unwrap_or(0);
        self.counted(|| {
            // SAFETY: a new mapping at an address of the kernel's choice, which is not used.
            unsafe {
                let at = libc::mmap(
                    std::ptr::null_mut(),
                    4096,
                    protection,
                    libc::MAP_SHARED,
                    fd,
                    0,
                );
                if at == libc::MAP_FAILED {
                    return -1;
                }
                libc::munmap(at, 4096);
            }
            0
        })
    }

    fn through_pipe(&mut self, call: &Call, body: impl FnOnce([i32; 2], usize) -> isize) -> Result {
        let mut pipe = [-1; 2];
        // SAFETY: two descriptors, which this function closes.
        if unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_NONBLOCK | libc::O_CLOEXEC) } != 0 {
            return of_errno(Errno::last());
        }
        let len = usize::try_from(call.get(Field::Size))
            .unwrap_or(ROOM)
            .min(ROOM);
        if let Ok(at) = self.memory.put(&[0; 512], Manner::Good) {
            // SAFETY: so many bytes lie there.
            unsafe { libc::write(pipe[1], pointer(at), 512) };
        }
        let result = self.counted(|| body(pipe, len) as i64);
        pipe.map(close);
        result
    }

    fn fcntl(&mut self, call: &Call, fd: i32) -> Result {
        let what = call.get(Field::Fcntl);
        // SAFETY: no memory of ours is involved, but for the lock, which outlives the call.
        self.counted(|| unsafe {
            let result = match what {
                0 => libc::fcntl(fd, libc::F_GETFL),
                1 => libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK),
                2 => libc::fcntl(fd, libc::F_SETFL, 0),
                3 => libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK | libc::O_ASYNC),
                4 => libc::fcntl(fd, libc::F_GETFD),
                5 => libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC),
                _ => {
                    let mut lock: libc::flock = std::mem::zeroed();
                    lock.l_type = 0;
                    libc::fcntl(fd, libc::F_SETLK, &raw mut lock)
                }
            };
            result.into()
        })
    }

    fn fork(&mut self, call: &Call, fd: i32) -> Result {
        let what = call.get(Field::Fork);
        let at = self.memory.room(512, Manner::Good);
        self.counted(|| {
            // SAFETY: the child makes system calls only, on numbers that it has from its parent, and ends.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    // It gets signals like this thread.
                    let soon = libc::itimerval {
                        it_interval: libc::timeval {
                            tv_sec: 0,
                            tv_usec: 3000,
                        },
                        it_value: libc::timeval {
                            tv_sec: 0,
                            tv_usec: 3000,
                        },
                    };
                    libc::setitimer(libc::ITIMER_REAL, &raw const soon, std::ptr::null_mut());
                    match what {
                        1 => drop(libc::close(fd)),
                        2 => drop(libc::read(fd, pointer(at).cast_mut(), 512)),
                        3 => drop(libc::write(fd, pointer(at), 320)),
                        4 => {
                            let mut fds = libc::pollfd {
                                fd,
                                events: libc::POLLIN,
                                revents: 0,
                            };
                            libc::poll(&raw mut fds, 1, 1);
                        }
                        _ => (),
                    }
                    libc::_exit(0);
                }
                if child < 0 {
                    return -1;
                }
                let mut status = 0;
                while libc::waitpid(child, &raw mut status, 0) < 0 && Errno::last() == Errno::EINTR
                {
                }
                status.into()
            }
        })
    }

    fn look(&mut self, call: &Call, fd: i32) -> Result {
        let class = |name| {
            let number = self.shared.scene.umad(call.get(Field::Device));
            format!("{}/umad{number}/{name}", umad::sysfs::CLASS)
        };
        let path = match call.get(Field::Text) {
            0 => format!("/proc/self/fdinfo/{fd}"),
            1 => class("ibdev"),
            2 => class("port"),
            _ => format!("{}/abi_version", umad::sysfs::CLASS),
        };
        match fs::read(path) {
            Ok(text) => i64::from(!text.is_empty()),
            Err(e) => of_io(&e),
        }
    }
}

fn close(fd: i32) {
    if fd >= 0 {
        // SAFETY: whoever calls this owns the descriptor.
        unsafe { libc::close(fd) };
    }
}

fn manner(call: &Call) -> Manner {
    Manner::new(call.get(Field::Mem), call.get(Field::Bad))
}

// Two parts of one buffer.
fn halves(at: u64, len: usize) -> [libc::iovec; 2] {
    let first = len / 2;
    let part = |offset: usize, len| libc::iovec {
        iov_base: pointer(at + offset as u64).cast_mut(),
        iov_len: len,
    };
    [part(0, first), part(first, len - first)]
}

fn pointer(at: u64) -> *const libc::c_void {
    // An address of a program has the length of a pointer; another is as good as none.
    usize::try_from(at).unwrap_or(0) as *const _
}

/// The lower half of a value.
pub fn low(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0)
}

fn signed(value: u64) -> i64 {
    i64::from_ne_bytes(value.to_ne_bytes())
}

fn of_errno(e: Errno) -> Result {
    -i64::from(e as i32)
}

fn of_io(e: &io::Error) -> Result {
    -i64::from(e.raw_os_error().unwrap_or(libc::EIO))
}

/// A result as text: a value, or an errno's name.
pub fn show(result: Result) -> String {
    match i32::try_from(-result) {
        Ok(errno @ 1..=4095) => match Errno::from_raw(errno) {
            Errno::UnknownErrno => format!("-{errno}"),
            name => format!("{name:?}"),
        },
        _ => result.to_string(),
    }
}

const _: () = assert!(size_of::<usize>() <= size_of::<u64>());

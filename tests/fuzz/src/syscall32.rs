// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! System calls as a 32-bit program makes them, from a 64-bit one: the kernel has an entry of its own for
//! them, whoever uses it.

/// `ioctl(fd, command, argument)`; the errno is negative.
#[cfg(target_arch = "x86_64")]
pub fn ioctl(fd: i32, command: u32, argument: u32) -> i64 {
    const IOCTL: i32 = 54;
    let result: i32;
    // SAFETY: the kernel checks what it is given; it writes to memory only where the argument says, which
    // the caller has no references to. The registers that the entry does not keep are told.
    unsafe {
        std::arch::asm!(
            "mov {keep}, rbx",
            "mov ebx, {fd:e}",
            "int 0x80",
            "mov rbx, {keep}",
            keep = out(reg) _,
            fd = in(reg) fd,
            inlateout("eax") IOCTL => result,
            in("ecx") command,
            in("edx") argument,
            out("r8") _,
            out("r9") _,
            out("r10") _,
            out("r11") _,
        );
    }
    i64::from(result)
}

/// On other processors there is none.
#[cfg(not(target_arch = "x86_64"))]
pub fn ioctl(_fd: i32, _command: u32, _argument: u32) -> i64 {
    -i64::from(libc::ENOSYS)
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn it_is_made() {
        // Where the kernel has no 32-bit programs, this test's process would die of it.
        if std::fs::exists("/proc/sys/abi/vsyscall32").unwrap_or(false) {
            assert_eq!(super::ioctl(-1, 0, 0), -i64::from(libc::EBADF));
        }
    }
}

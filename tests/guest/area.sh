# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2154 # here is of those who source this
#
# What the guest's jobs that run areas of the selftests share. Sourced.

# binary AREA: the program of an area; abi32-i686 is abi32 as a 32-bit program
binary() {
	case $1 in
	abi32-i686) echo /b/target/i686-unknown-linux-gnu/release/abi32 ;;
	*) echo "/b/target/release/$1" ;;
	esac
}

# load IMPL
load() {
	case $1 in
	c) insmod "$UMAD_KO_C" ;;
	rust) insmod "$UMAD_KO_RUST" ;;
	esac
}

# runs PID: whether a program of this shell's has not ended. Its directory stays until the shell has taken its
# status, which once in a thousand times it forgets to do by itself.
runs() {
	local state tasks
	read -r _ _ state _ <"/proc/$1/stat" || return 1
	tasks=("/proc/$1/task"/*)
	[ "$state" != Z ] || [ "${#tasks[@]}" -gt 1 ]
} 2>/dev/null

# as_found: what each area may rely on, and has to leave behind
as_found() {
	local what=
	[ -d /sys/module/ib_umad ] || what+=' the module is not loaded;'
	[ -c /dev/infiniband/umad0 ] && [ -c /dev/infiniband/umad1 ] || what+=' umad0 or umad1 is missing;'
	[ "$(cat /sys/class/infiniband_mad/umad0/ibdev 2>&1)" = rxe0 ] || what+=' umad0 is not of rxe0;'
	[ "$(cat /sys/class/infiniband_mad/umad1/ibdev 2>&1)" = rxe1 ] || what+=' umad1 is not of rxe1;'
	[ "$(find /sys/class/infiniband_mad -name 'umad*' | wc -l)" = 2 ] || what+=' the umad devices are not two;'
	[ -z "$what" ] || { echo "    # found:$what" && return 1; }
}

# repair IMPL: makes devices and module anew, so that one area's fault is not the next one's
repair() {
	rmmod ib_umad
	for dev in /sys/class/infiniband/*; do
		[ ! -e "$dev" ] || rdma link delete "${dev##*/}"
	done
	ip link delete d0
	"$here/rxe-setup" && load "$1"
} >/dev/null 2>&1

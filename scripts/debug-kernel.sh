# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2034,SC2154 # variables of and for the others
#
# The kernel that looks for faults: the stock kernel's source with the
# configuration of debug.config, built with clang. Its entry of the cache is
# laid out as a stock kernel's is (see kernel.sh), so whatever builds for
# $KERNEL or boots it takes this one as well. Sourced.

# debug_kernel_entry: where it is, or will be; root and stock entry are inputs
# as they hold the compilers and the source
debug_kernel_entry() {
	printf '%s/kernel-%s-debug-%s\n' "$CACHE" "$(cut -d - -f 1 "$KERNEL/version")" \
		"$({
			printf '%s\n' "$(cat "$KERNEL/version")" "${ROOT##*/}"
			cat "$TOP/scripts/debug.config" "$TOP/scripts/prepare-debug-kernel"
		} | key -)"
}

# debug_guest: what a guest with such a kernel wants otherwise
debug_guest() {
	# On a "pc" the kernel interprets a loop of the firmware's for each device to
	# learn of its interrupt: half a minute for each.
	GUEST_MACHINE=q35
	GUEST_MEMORY=4G
	GUEST_BOOT_LIMIT=1500
	GUEST_PARAMETERS='kasan_multi_shot rcupdate.rcu_cpu_stall_timeout=120'
	# how many times as long the tests are to be patient
	GUEST_VARIABLES='KTAP_SLOW=4'
}

# debug_kernel_ready: turns RELEASE and KERNEL from the stock kernel to this
# one; builds it unless it is there. Building takes long, so it has a lock of
# its own, and a place that an interrupted build goes on in: others may use and
# set up the cache meanwhile.
debug_kernel_ready() {
	local entry part
	step "The kernel that looks for faults"
	entry=$(debug_kernel_entry)
	part=$CACHE/part-${entry##*/}
	lock 9 "$CACHE/lock.debug-kernel" exclusive "another run is building this kernel"
	if [ -d "$entry" ]; then
		step_end "there: $entry"
	else
		note "building it from $(cat "$KERNEL/version"); some 25 minutes of processor time"
		mkdir -p "$part"
		# Links: the two trees share what they have in common, and each can be removed.
		[ -f "$part/root" ] || {
			rm -rf --one-file-system "$part/src"
			cp -al "$KERNEL/src" "$part/src"
			printf '%s\n' "${ROOT##*/}" >"$part/root"
		}
		run debug-kernel nice "$TOP/scripts/in-root" -r "$TOP" -m "$part:$entry" "$ROOT" \
			"$TOP/scripts/prepare-debug-kernel" "$entry" "$TOP/scripts/debug.config" "$JOBS"
		mv -T "$part" "$entry"
		step_end "built: $entry"
	fi
	exec 9>&-
	KERNEL=$entry
	RELEASE=$(cat "$KERNEL/release")
}

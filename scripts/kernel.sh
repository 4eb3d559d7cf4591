# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash
#
# The kernel: which one, and a tree of it that out-of-tree Rust modules can be
# built against. Debian's kernel headers hold nothing of rust/, so the tree is
# made of the same version's linux-source and the stock kernel's own
# configuration; the stock kernel itself is never rebuilt. Sourced.
#
# An entry of the cache, $KERNEL:
#   release, version   of the kernel
#   pkg/               its packages, unpacked (with modules.dep)
#   src/               its source
#   obj/               the prepared tree: what KDIR= takes
#   ib_umad.ko         the C module of the stock kernel
#   boot/              vmlinuz, and the modules that the guest needs to find its root

RELEASE=
KERNEL=
# What is chosen when nobody asks for a release: stays until "make update".
CHOICE=$CACHE/kernel-choice

# kernel_list: prints "RELEASE VERSION SOURCE" of all kernels whose source of
# the very same version can be had, newest first. Needs a fresh package index.
kernel_list() {
	"$TOP/scripts/in-root" -r "$TOP" "$ROOT" "$TOP/scripts/list-kernels"
}

# kernel_choose [RELEASE]: picks the newest kernel, or the one asked for;
# prints "RELEASE VERSION SOURCE"
kernel_choose() {
	local list line
	list=$(kernel_list)
	[ -n "$list" ] || die "the mirror offers no $SUITE-backports kernel with a linux-source of the same version right now." \
		"A mirror that is just being updated can be like that: try again later, or another one with UMAD_MIRROR=URL."
	if [ -n "${1:-}" ]; then
		line=$(awk -v r="$1" '$1 == r' <<<"$list")
		[ -n "$line" ] || die "cannot prepare kernel $1: it is no $SUITE-backports kernel, or its source is no longer in the archive." \
			"With a kernel that has its source there it works; these have:" \
			"$(awk '{ printf "%s  ", $1 }' <<<"$list")"
	else
		line=$(head -n 1 <<<"$list")
	fi
	printf '%s\n' "$line"
}

# kernel_entry RELEASE VERSION: where the tree of this kernel is, or will be;
# the root is an input as it holds the compilers
kernel_entry() {
	printf '%s/kernel-%s-%s\n' "$CACHE" "$1" \
		"$({
			printf '%s\n' "$1" "$2" "${ROOT##*/}"
			cat "$TOP/scripts/prepare-kernel" "$TOP/scripts/list-kernels"
		} | key -)"
}

# kernel_made RELEASE: the entry of a release, if there is one that can be used as it is
kernel_made() {
	local dir
	for dir in "$CACHE/kernel-$1"-*/; do
		dir=${dir%/}
		[ -f "$dir/version" ] || continue
		[ "$dir" != "$(kernel_entry "$1" "$(cat "$dir/version")")" ] || printf '%s\n' "$dir"
	done
}

# kernel_make RELEASE VERSION SOURCE: makes the entry. It is made in a
# temporary place that has, inside the root, its final name: the kernel's
# build system writes down absolute paths.
kernel_make() {
	entry_begin kernel
	retry kernel-packages "$TOP/scripts/in-root" -n -r "$TOP" -m "$TMP/kernel:$KERNEL" "$ROOT" \
		"$TOP/scripts/prepare-kernel" get "$KERNEL" "$@"
	note "packages fetched and unpacked"
	run kernel-prepare "$TOP/scripts/in-root" -r "$TOP" -m "$TMP/kernel:$KERNEL" "$ROOT" \
		"$TOP/scripts/prepare-kernel" make "$KERNEL" "$JOBS"
	printf '%s\n' "${ROOT##*/}" >"$TMP/kernel/root"
	entry_end kernel "$KERNEL"
}

# kernel_ready [RELEASE]: sets RELEASE and KERNEL; makes the tree unless it is there
kernel_ready() {
	local want=${1:-} version source line
	step "Kernel${want:+ $want}: packages, and a tree to build modules against"
	if [ -z "$want" ] && [ -s "$CHOICE" ]; then
		read -r want version source <"$CHOICE"
		KERNEL=$(kernel_made "$want")
		if [ -z "$KERNEL" ]; then
			# The choice stands, but its tree is gone or of older scripts.
			note "$want has to be prepared anew"
			want=
		fi
	elif [ -n "$want" ]; then
		KERNEL=$(kernel_made "$want")
	fi
	if [ -n "$KERNEL" ]; then
		RELEASE=$want
		step_end "there: $RELEASE ($KERNEL)"
		return
	fi
	root_refresh
	line=$(kernel_choose "$want")
	read -r RELEASE version source <<<"$line"
	KERNEL=$(kernel_entry "$RELEASE" "$version")
	if [ ! -d "$KERNEL" ]; then
		note "$RELEASE (packages $version, $source)"
		kernel_make "$RELEASE" "$version" "$source"
	fi
	if [ -z "${1:-}" ]; then
		printf '%s\n' "$line" >"$TMP/choice"
		mv "$TMP/choice" "$CHOICE"
	fi
	step_end "prepared: $RELEASE in $KERNEL"
}

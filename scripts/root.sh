# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash
#
# The Debian 13 root: toolchain for kernel, module and tests, and root file
# system of the guest. Made once, then never changed. Sourced.

SUITE=trixie
ROOT=

# dpkg's options: documents and translations are not missed, nor is care for a
# power failure, as a root that is not finished is never used
ROOT_DPKG=(force-unsafe-io 'path-exclude=/usr/share/man/*' 'path-exclude=/usr/share/locale/*'
	'path-exclude=/usr/share/doc/*' 'path-exclude=/usr/share/info/*')

# host_mirrors: the host's own Debian mirrors, as apt knows them (this reads
# deb822 and one-line files alike), best first
host_mirrors() {
	local uri suite list host_suite
	host_suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
	# shellcheck disable=SC2016 # apt's own variables
	apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
		while read -r uri suite component; do
			[ "$component" = main ] || continue
			case $suite in
			"$host_suite" | "$SUITE" | stable | oldstable | testing) ;;
			*) continue ;;
			esac
			case $uri in
			*security*) continue ;;
			mirror+file:*)
				# A file with a list of mirrors: the first one.
				list=${uri#mirror+file:}
				uri=$(sed -n 's/[[:space:]].*//;/^http/p' "/${list##/}" 2>/dev/null | head -n 1)
				;;
			esac
			case $uri in
			http://* | https://*) printf '%s\n' "${uri%/}" ;;
			esac
		done | awk '!seen[$0]++'
}

# mirror: the mirror to use
mirror() {
	local m
	m=${UMAD_MIRROR:-$(host_mirrors | head -n 1)}
	[ -n "$m" ] || die "found no Debian mirror in this machine's apt configuration (looked for component main of its own release)." \
		"Name one: make UMAD_MIRROR=URL ..."
	printf '%s\n' "${m%/}"
}

# root_sources MIRROR: the root's sources.list. Backports are for the kernel
# only and 32-bit packages come from the release alone, so that the versions
# of both architectures always agree.
root_sources() {
	printf 'deb [arch=amd64,i386] %s %s main\n' "$1" "$SUITE"
	printf 'deb [arch=amd64] %s %s-backports main\n' "$1" "$SUITE"
}

# root_packages: the package list, comma-separated
root_packages() { sed 's/#.*//' "$TOP/scripts/root-packages" | xargs | tr ' ' ','; }

# root_find: sets ROOT to where the root of this list of packages is, or will be
root_find() { ROOT=$CACHE/root-$(key "$TOP/scripts/root-packages" "$TOP/scripts/root.sh"); }

# root_make: makes it
root_make() {
	local m
	m=$(mirror)
	[ -s /usr/share/keyrings/debian-archive-$SUITE-stable.gpg ] ||
		warn "this machine's debian-archive-keyring is older than Debian $SUITE; if signatures cannot be checked, upgrade that package."
	note "mirror $m"
	entry_begin root
	root_sources "$m" >"$TMP/sources.list"
	"$TOP/scripts/in-root" --apt-options >"$TMP/apt.conf"
	# Mounts and processes of its own, so that nothing of it stays when it is
	# cut off. A failed attempt may have left what the next would trip over.
	# shellcheck disable=SC2016 # expanded by sh
	retry root unshare --mount --pid --fork --kill-child=KILL --mount-proc sh -c 'dir=$1; shift; rm -rf --one-file-system "$dir"; exec "$@"' sh "$TMP/root" \
		mmdebstrap --mode=root --variant=apt --architectures=amd64,i386 --aptopt="$TMP/apt.conf" \
		"${ROOT_DPKG[@]/#/--dpkgopt=}" \
		--include="$(root_packages)" "$SUITE" "$TMP/root" "$TMP/sources.list"
	# Where the guest finds its kernel's modules.
	mkdir -p "$TMP/root/usr/lib/modules"
	entry_end root "$ROOT"
}

# root_ready: makes the root unless it is there
root_ready() {
	step "Debian 13 root (toolchain, and the guest's file system)"
	root_find
	if [ -d "$ROOT" ]; then
		step_end "there: $ROOT"
		return
	fi
	root_make
	step_end "made: $(du -sh "$ROOT" | cut -f1) in $ROOT"
}

# root_refresh: brings the root's package index up to date
root_refresh() {
	root_sources "$(mirror)" >"$ROOT/etc/apt/sources.list"
	rm -f "$ROOT"/etc/apt/sources.list.d/*
	retry root-apt-update "$TOP/scripts/in-root" -n "$ROOT" apt-get -q update
}

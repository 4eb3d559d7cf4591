# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash
#
# Packages that the host itself needs; everything else lives in the root
# (root.sh). Sourced.

# program that must be there, and the package that brings it
HOST_PROGRAMS='
qemu-system-x86_64 qemu-system-x86
mmdebstrap         mmdebstrap
'
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

# host_packages_missing: prints the packages that are not there
host_packages_missing() {
	local program package
	while read -r program package; do
		[ -z "$program" ] || command -v "$program" >/dev/null || echo "$package"
	done <<<"$HOST_PROGRAMS"
	[ -s "$KEYRING" ] || echo debian-archive-keyring
}

# host_packages: installs what is missing, nothing else
host_packages() {
	local missing
	step 'Host packages'
	missing=$(host_packages_missing | tr '\n' ' ')
	if [ -z "$missing" ]; then
		step_end 'all there'
		return
	fi
	note "installing $missing"
	retry host-apt-update env DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=3 update
	# shellcheck disable=SC2086 # a list
	retry host-apt-install env DEBIAN_FRONTEND=noninteractive apt-get -q -y \
		-o Acquire::Retries=3 -o Dpkg::Use-Pty=0 install --no-install-recommends $missing
	missing=$(host_packages_missing | tr '\n' ' ')
	[ -z "$missing" ] || die "still missing after the installation: $missing" \
		"The full log is $LOGS/host-apt-install.log"
	step_end 'installed'
}

# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash
#
# The whole set-up, in order, and the modules of these scripts. Sourced by the
# commands (run, test, shell, lint, fmt, kernel, update).

# shellcheck source-path=SCRIPTDIR
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=lib.sh
. "$here/lib.sh"
# shellcheck source=host-packages.sh
. "$here/host-packages.sh"
# shellcheck source=root.sh
. "$here/root.sh"
# shellcheck source=kernel.sh
. "$here/kernel.sh"
# shellcheck source=build.sh
. "$here/build.sh"
# shellcheck source=guest.sh
. "$here/guest.sh"
# shellcheck source=programs.sh
. "$here/programs.sh"

# setup_begin: locks, in the order use, out, set-up
setup_begin() {
	need_root
	use_cache
	lock_out
	lock_setup
}

# setup_all: everything but what is built of the checkout; with nothing
# changed it neither asks apt nor touches the network
setup_all() {
	setup_begin
	host_packages
	root_ready
	kernel_ready "${KERNEL_RELEASE:-}"
	crates_ready
	unlock_setup
}

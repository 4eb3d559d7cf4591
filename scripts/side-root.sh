# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2034,SC2154 # variables of and for the others
#
# Roots for one purpose each, beside the one that builds and boots (root.sh). Sourced.

# side_root NAME: sets SIDE_ROOT to a root with the packages of scripts/NAME-packages; makes it unless it is there
side_root() {
	local list=$TOP/scripts/$1-packages ROOT
	step "Debian 13 root: ${list##*/}"
	SIDE_ROOT=$CACHE/root-$1-$(key "$list" "$TOP/scripts/root.sh")
	ROOT=$SIDE_ROOT
	if [ -d "$SIDE_ROOT" ]; then
		step_end "there: $SIDE_ROOT"
		return
	fi
	lock_setup
	# Another run may have made it meanwhile.
	[ -d "$SIDE_ROOT" ] || (
		# shellcheck disable=SC2317 # root_make calls it
		root_packages() { sed 's/#.*//' "$list" | xargs | tr ' ' ','; }
		root_make
	)
	unlock_setup
	step_end "made: $(du -sh "$SIDE_ROOT" | cut -f1) in $SIDE_ROOT"
}

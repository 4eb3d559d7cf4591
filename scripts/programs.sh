# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2154 # in_checkout is of build.sh
#
# What the programs of the field need beside the root's packages: rdma-core's own tests of libibumad,
# which Debian ships as source only. Sourced.

# libibumad_tests_ready: builds them once for a root, and puts them where the guest finds them
# ($OUT/libibumad-tests). They are an entry of the cache, made anew when root or recipe change.
libibumad_tests_ready() {
	local entry script=$TOP/scripts/libibumad-tests m
	step "rdma-core's tests of libibumad"
	entry=$CACHE/libibumad-tests-$({
		printf '%s\n' "${ROOT##*/}"
		cat "$script"
	} | key -)
	if [ -d "$entry" ]; then
		step_end 'there'
	else
		m=$(mirror)
		lock_setup
	fi
	# Another run may have made it meanwhile.
	if [ ! -d "$entry" ]; then
		entry_begin libibumad-tests
		retry libibumad-tests-get "$TOP/scripts/in-root" -n -r "$TOP" -b "$TMP/libibumad-tests" "$ROOT" \
			"$script" get "$TMP/libibumad-tests" "$m"
		run libibumad-tests-make "$TOP/scripts/in-root" -r "$TOP" -b "$TMP/libibumad-tests" "$ROOT" \
			"$script" make "$TMP/libibumad-tests"
		entry_end libibumad-tests "$entry"
		step_end "built: $(basename -a "$entry"/bin/* | xargs)"
	fi
	unlock_setup
	mkdir -p "$OUT/libibumad-tests"
	cp "$entry"/bin/* "$OUT/libibumad-tests/"
}

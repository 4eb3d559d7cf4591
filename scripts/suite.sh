# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2034,SC2154 # variables of and for the others
#
# The selftests in the guest, as a part of a test run. Sourced.

# whole suite and one area, in seconds; generous, as emulation is slow
limit=${UMAD_GUEST_TIMEOUT:-3000}
area_limit=${UMAD_AREA_TIMEOUT:-300}

# known_area NAME [OTHER...]: ends unless it is an area of the selftests; the
# others are what else the caller knows
known_area() {
	[ "$1" != abi32-i686 ] && [ ! -f "$TOP/tests/selftests/src/bin/$1.rs" ] && [ ! -f "$TOP/tests/fuzz/src/bin/$1.rs" ] || return 0
	die "there is no area $1." "All: $(cd "$TOP/tests/selftests/src/bin" && echo *.rs fuzz | sed 's/\.rs//g') abi32-i686 ${*:2}"
}

# known_impl NAME...: ends unless these are modules that the tests know
known_impl() {
	local impl
	for impl; do
		case $impl in
		c | rust) ;;
		*) die "there is no module $impl." 'IMPL is of: c (the kernel'"'"'s own), rust (ours)' ;;
		esac
	done
}

# guest_part NUMBER NAME JOB: a part that is a guest's job. The job leaves /out/counts; where it could not, what it
# printed counts: results that are as deep as $depth blanks.
guest_part() {
	local before=$FAILED p=0 f=0 s=0
	guest_new "$2" "$3"
	guest_start "$ACCEL" "$limit" show '  '
	if [ -s "$RUN/counts" ]; then
		read -r p f s <"$RUN/counts"
	else
		read -r p f s < <(tr -d '\r' <"$RUN/console" | awk -v depth="$depth" '
			{ match($0, /^ */); own = RLENGTH == depth; sub(/^ */, "") }
			own && /^ok / { if (/# SKIP/) s++; else p++ }
			own && /^not ok / { f++ }
			END { print p + 0, f + 0, s + 0 }')
	fi
	PASSED=$((PASSED + p)) FAILED=$((FAILED + f)) SKIPPED=$((SKIPPED + s))
	case $GUEST_STATUS in
	hung | died)
		guest_trouble "$limit" 2>&1 | sed 's/^/  # /'
		ktap_check 99 1 "the guest runs to its end ($GUEST_STATUS)"
		;;
	0)
		# Success without counts, or without checks, is none.
		[ "$p" -gt 0 ] || ktap_check 99 1 'the guest ran checks'
		;;
	*) [ "$f" -gt 0 ] || ktap_check 99 1 "the guest's runner (exit status $GUEST_STATUS)" "$RUN/console" ;;
	esac
	ktap_part "$1" "$2" "$before"
}

# part_guest NUMBER [NAME]: the selftests of $areas on $IMPL, by default all on
# both, in a guest of that name
part_guest() {
	local depth=4 name GUEST_VARIABLES=$GUEST_VARIABLES
	for name in UMAD_CYCLES UMAD_SEED; do
		[ -z "${!name:-}" ] || GUEST_VARIABLES+=$'\n'"$name=${!name}"
	done
	guest_part "$1" "${2:-test}" "exec /p/tests/guest/run-suite -t $area_limit ${IMPL:+-i \"$IMPL\"} ${areas:+-a \"$areas\"}"
}

# part_stale NUMBER: the area "stale", in a guest that fills what is allocated, and what is freed, with a pattern. Its
# own: there ib_core and rxe fall over what they use when it is freed, wherever devices go under load.
part_stale() {
	local areas=stale GUEST_PARAMETERS="$GUEST_PARAMETERS init_on_alloc=0 slab_debug=P,kmalloc-*"
	part_guest "$1" stale
}

# rst: escapes what reStructuredText would take for markup
rst() { sed -E 's/[\\*`|_]/\\&/g'; }

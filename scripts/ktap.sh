# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash
#
# KTAP from the host's side, and the sums. A check is an innermost result;
# results that sum up others are not counted. Sourced.

PASSED=0
FAILED=0
SKIPPED=0

# ktap_check NUMBER STATUS NAME [FILE]: one result, one level deep; when it is
# a failure the end of FILE is shown as a diagnostic
ktap_check() {
	if [ "$2" -eq 0 ]; then
		PASSED=$((PASSED + 1))
		printf '  ok %d %s\n' "$1" "$3"
		return
	fi
	FAILED=$((FAILED + 1))
	# Without the log's first line, the command, and cargo's progress.
	[ ! -s "${4:-}" ] || sed -E '1{/^\$ /d}; /^ +(Compiling|Checking|Finished|Documenting) /d' "$4" | tail -n 60 | sed 's/^/  # /'
	printf '  not ok %d %s\n' "$1" "$3"
}

# ktap_part NUMBER NAME FAILED-BEFORE: the result of a part
ktap_part() {
	if [ "$FAILED" -eq "$3" ]; then
		printf 'ok %d %s\n' "$1" "$2"
	else
		printf 'not ok %d %s\n' "$1" "$2"
	fi
}

# ktap_lint NUMBER: the linters as a part of the tests
ktap_lint() {
	local i st before=$FAILED
	printf '  KTAP version 1\n  # Subtest: lint\n  1..%d\n' ${#LINTS[@]}
	for i in "${!LINTS[@]}"; do
		st=0
		"lint_${LINTS[i]#*:}" || st=$?
		ktap_check $((i + 1)) "$st" "${LINTS[i]%:*}" "$LOGS/lint-$(tr _ - <<<"${LINTS[i]#*:}").log"
	done
	ktap_part "$1" lint "$before"
}

# sums: the last line of a test run; status 1 if anything failed or nothing ran
sums() {
	printf '\n%d passed, %d failed' "$PASSED" "$FAILED"
	[ "$SKIPPED" -eq 0 ] || printf ', %d skipped' "$SKIPPED"
	printf '\n'
	[ "$FAILED" -eq 0 ] && [ "$PASSED" -gt 0 ]
}

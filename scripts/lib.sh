# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2034 # used by those who source this
#
# What every script here shares: where things are, how steps are shown, how
# long commands are run and logged, and the locks. Sourced, never run.

set -euo pipefail
# What the host has set up for itself is of no meaning here.
unset CDPATH GREP_OPTIONS
umask 022

TOP=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# All that is made lives here, outside the work tree.
CACHE=$(realpath -m "${UMAD_CACHE:-/var/cache/umad-rs}")
# What belongs to this checkout only: objects, test binaries, logs, results.
OUT=$CACHE/out/$(printf %s "$TOP" | sha256sum | cut -c1-12)
LOGS=$OUT/logs
# Half-made things; whatever lies here when a run starts is a leftover.
TMP=$CACHE/tmp
JOBS=$(nproc)

# what a build in the checkout leaves there (.gitignore names the same)
BUILT=('*.o' '*.ko' '*.mod' '*.mod.c' '*.rmeta' '.*.cmd' '.*.d' modules.order Module.symvers
	bindings_types.rs bindings_funcs.rs bindings_wrap.c rust-project.json)

STEP=0
STEP_START=0
HEARTBEAT=
CHILD=
# what a line of the heartbeat begins with
BEAT='    '

# ---- messages ---------------------------------------------------------------

# is_tty: a person is watching
is_tty() { [ -t 1 ] && [ "${TERM:-dumb}" != dumb ]; }

# clock SECONDS: prints m:ss
clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

# step TEXT: starts the next numbered step
step() {
	STEP=$((STEP + 1))
	STEP_START=$SECONDS
	if is_tty; then
		printf '\033[1m[%d] %s\033[0m\n' "$STEP" "$1"
	else
		printf '[%d] %s\n' "$STEP" "$1"
	fi
}

# note TEXT...: a line that belongs to the current step
note() { printf '    %s\n' "$*"; }

# step_end TEXT: ends the current step, with its time when that is worth saying
step_end() {
	local t=$((SECONDS - STEP_START))
	if [ "$t" -ge 2 ]; then
		note "$1 ($(clock "$t"), $(clock "$SECONDS") in all)"
	else
		note "$1"
	fi
}

# warn TEXT...
warn() { printf '    warning: %s\n' "$*" >&2; }

# exit status of a script that has said why it stops; its caller sees 1
SAID=4
AT=

# die TEXT...: one line per argument, then the end
die() {
	printf '\nerror: %s\n' "$1" >&2
	shift
	[ $# -eq 0 ] || printf '       %s\n' "$@" >&2
	exit "$SAID"
}

# ---- commands ---------------------------------------------------------------

# last_line FILE: its last line, made fit to be shown on one line
last_line() {
	tail -c 2000 "$1" 2>/dev/null | tr '\r' '\n' | tr -cd '\11\40-\176\n' |
		expand | awk 'NF { sub(/^ */, ""); line = $0 } END { print line }'
}

# heartbeat FILE: shows that a long command lives; runs until it is killed
heartbeat() {
	local t0=$SECONDS t width text
	# The locks are the main script's alone.
	exec 7>&- 8>&- 9>&-
	width=$(tput cols 2>/dev/null || echo 80)
	while sleep 1 >/dev/null && kill -0 $$ 2>/dev/null; do
		t=$((SECONDS - t0))
		if is_tty; then
			text="$BEAT$(clock $t)  $(last_line "$1")"
			printf '\r\033[K%s' "${text:0:$((width - 1))}"
		elif [ $((t % 20)) -eq 0 ]; then
			text="$BEAT... $(clock $t)  $(last_line "$1")"
			printf '%s\n' "${text:0:110}"
		fi
	done
}

# heartbeat_stop: ends the heartbeat and clears its line
heartbeat_stop() {
	[ -n "$HEARTBEAT" ] || return 0
	kill "$HEARTBEAT" 2>/dev/null || true
	wait "$HEARTBEAT" 2>/dev/null || true
	HEARTBEAT=
	if is_tty; then printf '\r\033[K'; fi
}

# try NAME COMMAND...: runs a command (not a function) with its output in
# $LOGS/NAME.log and a heartbeat; returns its status. The command runs in the
# background and is waited for, so that an interrupt acts at once, and dies
# with this script even when that is killed; so it needs no hold on the locks.
try() {
	local log=$LOGS/$1.log st=0
	shift
	mkdir -p "$LOGS"
	printf '$ %s\n' "$*" >"$log"
	heartbeat "$log" &
	HEARTBEAT=$!
	setpriv --pdeathsig KILL "$@" </dev/null >>"$log" 2>&1 7>&- 8>&- 9>&- &
	CHILD=$!
	wait "$CHILD" || st=$?
	CHILD=
	heartbeat_stop
	return "$st"
}

# show_log NAME: the end of a log, for a person who wonders what failed
show_log() {
	{
		printf '    ---- end of %s\n' "$LOGS/$1.log"
		tail -n "${2:-40}" "$LOGS/$1.log" | sed 's/^/    | /'
	} >&2
}

# run NAME COMMAND...: like try, but a failure ends the script
run() {
	local st=0
	try "$@" || st=$?
	[ "$st" -eq 0 ] && return
	show_log "$1"
	die "step $STEP failed (exit status $st)." "The full log is $LOGS/$1.log"
}

# retry NAME COMMAND...: for what needs the network: three attempts
retry() {
	local n st=0
	for n in 1 2 3; do
		st=0
		try "$@" || st=$?
		[ "$st" -eq 0 ] && return
		[ "$n" -eq 3 ] && break
		note "attempt $n failed: $(last_line "$LOGS/$1.log"); trying again in $((n * 5)) s"
		sleep $((n * 5))
	done
	show_log "$1"
	die "step $STEP failed three times (exit status $st)." \
		"If the package mirror or the network had a bad moment, run the same command again." \
		"The full log is $LOGS/$1.log"
}

# cleanup: the EXIT trap
cleanup() {
	local st=$?
	heartbeat_stop
	# Waited for, so that the shell does not tell that it was killed.
	[ -z "$CHILD" ] || { kill -KILL "$CHILD" && wait "$CHILD"; } 2>/dev/null || true
	case $st in
	0 | 129 | 130 | 143) return ;;
	"$SAID") ;;
	*) printf '\nerror: unexpected failure (status %d) at %s\n' "$st" "$AT" >&2 ;;
	esac
	exit 1
}
trap cleanup EXIT
trap 'AT="${BASH_SOURCE[0]}:$LINENO: $BASH_COMMAND"' ERR
set -E
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# ---- cache ------------------------------------------------------------------

# key FILE... : short hash of the files' contents, to name what is made of them
key() { cat "$@" | sha256sum | cut -c1-12; }

# need_root: set-up mounts, chroots and installs
need_root() {
	[ "$(id -u)" -eq 0 ] || die "this needs root: it installs packages, makes a Debian tree and mounts into it." \
		"Run it as root (for example: sudo make ...)." \
		"Without root, \"make KDIR=DIR\" builds the module against a prepared kernel tree."
	case $TOP$CACHE in
	*[[:space:]:,]*) die "the kernel's build system and QEMU cannot work with blanks, colons or commas in a path:" \
		"checkout $TOP" "cache    $CACHE" ;;
	esac
	[ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] ||
		die "this works on Debian (12 or 13) for amd64 only."
}

# lock FD FILE ex|sh TEXT: takes a lock; waits, and says so, if it is taken.
# The file may be removed by "make distclean" meanwhile: then begin again.
lock() {
	local fd=$1 file=$2 mode=$3
	while :; do
		mkdir -p "${file%/*}"
		eval "exec $fd>>\"\$file\""
		if ! flock -n "--$mode" "$fd"; then
			note "$4: waiting for it to end ..."
			flock "--$mode" "$fd"
		fi
		[ "/proc/$$/fd/$fd" -ef "$file" ] && return
	done
}

# entry_begin NAME: makes $TMP/NAME, to be filled and then put in its place by entry_end
entry_begin() {
	rm -rf --one-file-system "${TMP:?}/$1"
	mkdir -p "$TMP/$1"
}

# entry_end NAME PLACE: the rename is what makes an entry of the cache: it is
# there whole, or not at all
entry_end() {
	rm -rf --one-file-system "$2"
	mv -T "$TMP/$1" "$2"
}

# use_cache: a shared lock; as long as it is held nobody removes the cache
use_cache() { lock 8 "$CACHE/lock.use" shared "the cache $CACHE is being removed"; }

# lock_setup, unlock_setup: one at a time changes what is shared in the cache
lock_setup() {
	lock 9 "$CACHE/lock.setup" exclusive "another run is setting up $CACHE"
	# Nobody else works in here now.
	rm -rf --one-file-system "$TMP"
	mkdir -p "$TMP"
}
unlock_setup() { exec 9>&-; }

# lock_out: one at a time builds and runs for this checkout
lock_out() { lock 7 "$OUT/lock" exclusive "another run works for this checkout"; printf '%s\n' "$TOP" >"$OUT/checkout"; }

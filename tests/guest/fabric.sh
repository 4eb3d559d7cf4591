# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2034 # used by those who source this
#
# A simulated InfiniBand fabric in the guest: ibsim, and virtual HCAs that are nodes of it, each with a
# bridge of its own. Sourced by jobs.
#
#   fabric_up [-b BRIDGES] [-d FRACTION] [-s SEED] [-n NODE] WHAT
#                            WHAT is a number of nodes, or a file as ibnetdiscover writes it. Starts
#                            ibsim and the bridges (1 by default), at different hosts; with -n the first one is at NODE.
#                            With -d the bridges lose this fraction of frames (0.01 is 1 %), chosen by SEED.
#   fabric_bridge N [OPTION...]     starts bridge N (its device is vhcaN) anew, with other options
#   fabric_unbridge N        ends bridge N: its device is gone
#   fabric_sim_stop, fabric_sim_start     ends ibsim, by SIGKILL, and starts it again; bridges reconnect
#   fabric_console COMMAND   a command for ibsim's console, as in: fabric_console 'Unlink "S-1"[3]'
#   fabric_stat N NAME       a counter of bridge N
#   fabric_umad N            number of the umad device of vhcaN's port 1; waits for it
#   fabric_down              ends all of it
#
# fabric_up sets FABRIC_NODES, FABRIC_SWITCHES, FABRIC_CAS, FABRIC_LINKS and the array FABRIC_PLACES: the
# ids of the nodes at which the bridges 0, 1, ... are. All return a status that is not 0, and say why, if something
# went wrong. ib_umad is the caller's.

FABRIC=/tmp/fabric
FABRIC_BIN=/b/target/release
FABRIC_SIM='' FABRIC_PIDS=() FABRIC_PLACES=() FABRIC_OPTIONS=''
FABRIC_NODES=0 FABRIC_SWITCHES=0 FABRIC_CAS=0 FABRIC_LINKS=0
# A descriptor that never has anything to read: a way to sleep without a process.
exec {FABRIC_NOTHING}<> <(:)

# fabric_wait TENTHS COMMAND...: until the command succeeds
fabric_wait() {
	local left=$1
	shift
	until "$@" >/dev/null 2>&1; do
		[ $((left -= 1)) -gt 0 ] || return 1
		read -r -t 0.1 -u "$FABRIC_NOTHING" || true
	done
}

# fabric_wrong TEXT FILE: says what went wrong, with the end of a log
fabric_wrong() {
	echo "fabric: $1" >&2
	tail -n 5 "$2" 2>/dev/null | sed 's/^/fabric:   /' >&2
	return 1
}

# fabric_topology WHAT [NODE]: writes ibsim's file, and sets what it says
fabric_topology() {
	local command=(convert "$1" ${2:+--node "$2"}) nodes switches cas links options places
	[[ ! $1 =~ ^[0-9]+$ ]] || command=(generate --nodes "$1")
	"$FABRIC_BIN/ib-topology" "${command[@]}" -o "$FABRIC/net" >"$FABRIC/facts" || return 1
	# shellcheck source=/dev/null
	. "$FABRIC/facts"
	FABRIC_NODES=$nodes FABRIC_SWITCHES=$switches FABRIC_CAS=$cas FABRIC_LINKS=$links FABRIC_OPTIONS=$options
	read -r -a FABRIC_PLACES <<<"$places"
}

# fabric_sim_start: ibsim, its console at a FIFO, as it would spin at the end of a file
fabric_sim_start() {
	# shellcheck disable=SC2086 # several words
	ibsim -s $FABRIC_OPTIONS "$FABRIC/net" <"$FABRIC/console" >"$FABRIC/ibsim.log" 2>&1 &
	FABRIC_SIM=$!
	fabric_wait 300 grep -q 'simulator ready' "$FABRIC/ibsim.log" ||
		fabric_wrong 'ibsim did not start' "$FABRIC/ibsim.log"
}

fabric_sim_stop() {
	kill -KILL "$FABRIC_SIM"
	wait "$FABRIC_SIM" 2>/dev/null || true
	FABRIC_SIM=
}

fabric_bridge() {
	local n=$1 log=$FABRIC/bridge$1.log
	shift
	: >"$log"
	"$FABRIC_BIN/ibsim-bridge" --node "${FABRIC_PLACES[n]}" --device "vhca$n" --stats "$FABRIC/stats$n" "$@" >"$log" 2>&1 &
	FABRIC_PIDS[n]=$!
	fabric_wait 200 grep -q '^ready:' "$log" || fabric_wrong "bridge $n did not start" "$log"
}

fabric_unbridge() {
	local pid=${FABRIC_PIDS[$1]} st=0
	unset "FABRIC_PIDS[$1]"
	kill "$pid" || true
	wait "$pid" || st=$?
	[ "$st" -eq 0 ] || fabric_wrong "bridge $1 ended with status $st" "$FABRIC/bridge$1.log"
}

fabric_up() {
	local bridges=1 options=() node='' n o OPTIND=1
	while getopts b:d:s:n: o; do
		case $o in
		b) bridges=$OPTARG ;;
		d) options+=(--drop "$OPTARG") ;;
		s) options+=(--seed "$OPTARG") ;;
		n) node=$OPTARG ;;
		*) return 2 ;;
		esac
	done
	shift $((OPTIND - 1))
	mkdir -p "$FABRIC"
	fabric_topology "$1" "$node" || return 1
	[ "$bridges" -le "${#FABRIC_PLACES[@]}" ] || fabric_wrong "no room for $bridges bridges" /dev/null || return 1
	# Room for bursts; ibsim spins without.
	sysctl -qw net.unix.max_dgram_qlen=512
	modprobe ib_core
	[ -d /sys/module/ib_vhca ] || insmod "$UMAD_KO_VHCA" || return 1
	fabric_wait 50 test -c /dev/ib_vhca/control || fabric_wrong 'ib_vhca has no control device' /dev/null || return 1
	[ -p "$FABRIC/console" ] || mkfifo "$FABRIC/console"
	exec {FABRIC_FIFO}<>"$FABRIC/console"
	fabric_sim_start || return 1
	for ((n = 0; n < bridges; n++)); do
		fabric_bridge "$n" "${options[@]}" || return 1
	done
}

fabric_console() { printf '%s\n' "$1" >&"$FABRIC_FIFO"; }

fabric_stat() { awk -v name="$2" '$1 == name { print $2; found = 1 } END { exit !found }' "$FABRIC/stats$1"; }

# fabric_find_umad N: prints the number, if it is there
fabric_find_umad() {
	local dir
	for dir in /sys/class/infiniband_mad/umad*; do
		[ "$(cat "$dir/ibdev" 2>/dev/null):$(cat "$dir/port" 2>/dev/null)" = "vhca$1:1" ] || continue
		[ -c "/dev/infiniband/${dir##*/}" ] || return 1
		echo "${dir##*/umad}"
		return
	done
	return 1
}

fabric_umad() {
	if fabric_wait 100 fabric_find_umad "$1"; then
		fabric_find_umad "$1"
	else
		fabric_wrong "vhca$1 has no umad device" /dev/null
	fi
}

fabric_down() {
	local n st=0
	for n in "${!FABRIC_PIDS[@]}"; do
		fabric_unbridge "$n" || st=1
	done
	if [ -n "$FABRIC_SIM" ]; then
		kill -TERM "$FABRIC_SIM" || st=1
		wait "$FABRIC_SIM" 2>/dev/null || true
		FABRIC_SIM=
	fi
	exec {FABRIC_FIFO}>&- || true
	rmmod ib_vhca || st=1
	return "$st"
}

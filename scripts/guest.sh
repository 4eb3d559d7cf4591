# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2154 # in_checkout is of build.sh
#
# The guest: the kernel of $KERNEL in QEMU, with the root as its file system. What
# it writes goes to memory, except for one directory, which brings back what
# the job leaves there. See tests/guest/ for the guest's own side. Sourced.

# the directory of one boot: job, exit status, console, dmesg, results
RUN=
ACCEL=
# what a kernel may want otherwise: machine, memory, more kernel parameters,
# variables for the job (lines NAME=VALUE)
GUEST_MACHINE=pc
GUEST_MEMORY=2G
GUEST_PARAMETERS=
# how many seconds the kernel may take until the job begins
GUEST_BOOT_LIMIT=300
GUEST_VARIABLES=

# guest_initrd: sets INITRD; made again when the kernel or its init changes
guest_initrd() {
	INITRD=$OUT/initrd-$(key "$KERNEL/version" "$TOP/tests/guest/init" "$TOP/scripts/make-initrd")
	[ -s "$INITRD" ] || run initrd "${in_checkout[@]}" -r "$KERNEL" "$ROOT" \
		"$TOP/scripts/make-initrd" "$KERNEL/boot" "$TOP/tests/guest/init" "$INITRD"
}

# guest_new NAME JOB: an empty $RUN for a boot, with its job (a shell script's text)
guest_new() {
	RUN=$OUT/guest-$1
	rm -rf "$RUN"
	mkdir -p "$RUN"
	printf '%s\n' "$2" >"$RUN/job"
	printf 'TOP=%s\nMODULE=%s\n%s\n' "$TOP" "${MODULE:+/b/${MODULE##*/}}" "$GUEST_VARIABLES" >"$RUN/env"
}

# share TAG DIR [ro]: QEMU's options for a directory that the guest mounts
share() {
	printf '%s\n' -fsdev "local,id=$1,path=$2,security_model=none,multidevs=remap${3:+,readonly=on}" \
		-device "virtio-9p-pci,fsdev=$1,mount_tag=$1"
}

# guest_options ACCEL: QEMU's options, one a line
guest_options() {
	local cpus=2
	case $1 in
	kvm) printf '%s\n' -accel kvm -cpu host ;;
	# 5-level page tables of an emulated processor trouble some kernels.
	tcg) printf '%s\n' -accel tcg,thread=multi -cpu max,la57=off ;;
	# The guest's time is the number of instructions that it has executed; idle time costs nothing.
	icount)
		cpus=1
		printf '%s\n' -accel tcg,thread=single -icount shift=0,sleep=off -cpu max,la57=off
		;;
	esac
	# After an oops nothing that the guest says is worth the wait, unless it is what one waits for: end at once.
	printf '%s\n' -machine "$GUEST_MACHINE" -smp "$cpus" -m "${UMAD_GUEST_MEMORY:-$GUEST_MEMORY}" -display none -nic none -no-reboot \
		-kernel "$KERNEL/boot/vmlinuz" -initrd "$INITRD" \
		-append "console=ttyS0 panic=-1${GUEST_LIVES_ON:- oops=panic} quiet loglevel=3 log_buf_len=16M no_timer_check $GUEST_PARAMETERS"
	share root "$ROOT" ro
	share kernel "$KERNEL" ro
	share build "$OUT" ro
	share checkout "$TOP" ro
	share run "$RUN"
}

# guest_began: whether the job of $RUN has begun
guest_began() { grep -q '^@guest begin' "$RUN/console"; }

# guest_start ACCEL SECONDS [show [INDENT]]: boots $RUN with a bound, console
# to $RUN/console; with show, what the job prints is shown. Sets GUEST_STATUS to the job's
# exit status, or "hung" or "died". A kernel that does not come as far as the
# job, and so not to our module, is booted again: emulation on several threads
# at times executes code that the kernel is just patching, or loses the timer.
guest_start() {
	local more=2
	guest_boot "$@"
	while ! guest_began && [ "$more" -gt 0 ]; do
		guest_trouble "$2" 2>&1 | sed "s/^/${4:-}# /"
		printf '%s# %s\n' "${4:-}" "the kernel did not come as far as the job: booting again"
		more=$((more - 1))
		guest_boot "$@"
	done
}

# guest_boot ACCEL SECONDS [show [INDENT]]: boots $RUN once
guest_boot() {
	local options=() st=0 watch viewer=''
	mapfile -t options < <(guest_options "$1")
	: >"$RUN/console"
	rm -f "$RUN/status"
	setpriv --pdeathsig KILL timeout -k 5 "$2" setpriv --pdeathsig KILL \
		qemu-system-x86_64 "${options[@]}" -monitor none -serial "file:$RUN/console" </dev/null >"$RUN/qemu" 2>&1 7>&- 8>&- 9>&- &
	CHILD=$!
	guest_watch "$CHILD" "$2" &
	watch=$!
	if [ -n "${3:-}" ]; then
		tail -q -n +1 -s 0.1 -f --pid="$CHILD" "$RUN/console" 2>/dev/null |
			sed -u -n "s/\r//g; /^@guest begin\$/,/@guest end\$/{/@guest [a-z]*\$/!s/^/${4:-}/p}" &
		viewer=$!
	fi
	wait "$CHILD" || st=$?
	CHILD=
	[ -z "$viewer" ] || wait "$viewer" || true
	wait "$watch" || true
	if [ -s "$RUN/status" ]; then
		GUEST_STATUS=$(cat "$RUN/status")
	elif [ "$st" -eq 124 ] || [ "$st" -eq 137 ] || [ "$st" -eq 143 ]; then
		GUEST_STATUS=hung
	else
		GUEST_STATUS=died
	fi
}

# guest_watch PID SECONDS: ends a boot that does not come as far as the job
guest_watch() {
	local left=$((GUEST_BOOT_LIMIT < $2 ? GUEST_BOOT_LIMIT : $2))
	while kill -0 "$1" 2>/dev/null && ! guest_began; do
		[ "$left" -gt 0 ] || kill "$1" 2>/dev/null || true
		left=$((left - 1))
		sleep 1
	done
}

# guest_trouble SECONDS: tells about a guest that hung or died
guest_trouble() {
	{
		case $GUEST_STATUS in
		hung) note "the guest was stopped after $(guest_began && echo "$1" || echo "$GUEST_BOOT_LIMIT") s" ;;
		died) note "the guest ended without a result" ;;
		esac
		sed 's/^/    qemu: /' "$RUN/qemu"
		note "---- end of $RUN/console"
		tr -d '\r' <"$RUN/console" | tail -n 40 | sed 's/^/    | /'
	} >&2
}

# guest_accel: sets ACCEL to kvm if a guest really starts with it, else to tcg.
# A /dev/kvm alone says little: nested virtualisation can offer one that does
# not run this kernel. The answer is remembered for kernel, processor and QEMU.
guest_accel() {
	local qemu cpu file
	ACCEL=${UMAD_ACCEL:-}
	[ -z "$ACCEL" ] || return 0
	ACCEL=tcg
	[ -w /dev/kvm ] || return 0
	qemu=$(qemu-system-x86_64 --version | head -n 1)
	cpu=$(sed -n '/^model name/{p;q}' /proc/cpuinfo)
	file=$CACHE/accel-$(printf '%s\n' "$RELEASE" "$qemu" "$cpu" "$(uname -r)" | key -)
	if [ ! -s "$file" ]; then
		note 'trying whether a guest starts with KVM ...'
		guest_new kvm-probe 'true'
		guest_boot kvm 20
		[ "$GUEST_STATUS" != 0 ] || ACCEL=kvm
		printf '%s\n' "$ACCEL" >"$file.new"
		mv "$file.new" "$file"
	fi
	ACCEL=$(cat "$file")
}

# guest_ready: what each boot needs
guest_ready() {
	guest_initrd
	guest_accel
	case $ACCEL in
	kvm) note 'with KVM' ;;
	*) note 'emulated (TCG), as KVM does not run a guest here; booting takes some 10 s' ;;
	esac
}

# guest_shell: a shell in the guest, on this terminal
guest_shell() {
	local options=() saved=
	mapfile -t options < <(guest_options "$ACCEL")
	if [ -t 0 ]; then
		printf 'ROWS_COLS="%s"\n' "$(stty size)" >>"$RUN/env"
		saved=$(stty -g)
	fi
	printf 'TERM=%s\n' "${TERM:-dumb}" >>"$RUN/env"
	setpriv --pdeathsig KILL qemu-system-x86_64 "${options[@]}" -serial mon:stdio 7>&- 8>&- 9>&- || true
	[ -z "$saved" ] || stty "$saved"
}

# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2034 # used by those who source this
#
# Builds the module and the user-space tests inside the root, with everything
# that is made going to $OUT: the checkout is mounted read-only. Sourced.

CARGO=$CACHE/cargo
# where cargo puts the tests
TARGET=$OUT/target
# where kbuild puts the module; a directory for each kernel
MODULE=
# the copy of the sources that kbuild builds
SOURCE=$OUT/source

# in_checkout ARGUMENTS...: the words of an in-root command that sees the checkout
in_checkout=("$TOP/scripts/in-root" -r "$TOP" -b "$OUT")

# module_source: copies the module's source to $SOURCE. With objects kept
# elsewhere the kernel's build system wants a source tree that was never built
# in, but a user may well have done so. Times are kept, for make to compare.
module_source() {
	rm -rf "${SOURCE:?}"
	mkdir -p "$SOURCE"
	{
		tar -C "$TOP" -c --exclude-vcs --exclude=./tests --exclude=./umadctl "${BUILT[@]/#/--exclude=}" .
		tar -C "$TOP" -c "${BUILT[@]/#/--exclude=}" ./tests/vhca ./tests/floor
	} | tar -C "$SOURCE" -x --ignore-zeros
}

# kbuild FOLDER DIR GOAL [VARIABLE=VALUE]...: prints, as words ended by NUL, the
# command that runs the kernel's build system on the module in this folder of
# the checkout, objects in DIR.
# The copy of the source has the checkout's path in there, so that messages
# name the files that they are about.
kbuild() {
	local folder=$1 dir=$2 goal=$3
	shift 3
	printf '%s\0' "$TOP/scripts/in-root" -m "$SOURCE:$TOP" -b "$OUT" -r "$KERNEL" "$ROOT" \
		make -C "$KERNEL/obj" "M=$(realpath -m "$TOP/$folder")" "MO=$dir" "-j$JOBS" "$@" "$goal"
}

# build_module: sets MODULE, the directory with ib_umad.ko
build_module() { build_module_with ''; }

# build_module_with SUFFIX [VARIABLE=VALUE...]: the same with variables for the
# kernel's build system; it is kept apart by the suffix
build_module_with() {
	local command=() suffix=$1
	shift
	step "Module ib_umad.ko for $RELEASE"
	[ -f "$TOP/Kbuild" ] || die "there is no Kbuild in $TOP."
	MODULE=$OUT/module-${KERNEL##*/kernel-}$suffix
	mkdir -p "$MODULE"
	module_source
	mapfile -d '' command < <(kbuild . "$MODULE" modules "$@")
	run module "${command[@]}"
	[ -f "$MODULE/ib_umad.ko" ] || die "the build made no ib_umad.ko." "The full log is $LOGS/module.log"
	step_end "built: $MODULE/ib_umad.ko"
}

# build_for_tests NAME FOLDER: ib_NAME.ko, to the directory of the module
build_for_tests() {
	local command=() name=$1 dir=$OUT/$1-${KERNEL##*/kernel-}
	mkdir -p "$dir"
	mapfile -d '' command < <(kbuild "$2" "$dir" modules)
	run "$name" "${command[@]}"
	[ -f "$dir/ib_$name.ko" ] || die "the build made no ib_$name.ko." "The full log is $LOGS/$name.log"
	cp "$dir/ib_$name.ko" "$MODULE/ib_$name.ko"
	step_end "built: $MODULE/ib_$name.ko"
}

# build_vhca: the virtual HCA of the tests, to the directory of the module
build_vhca() {
	step "Module ib_vhca.ko, the tests' virtual HCA"
	build_for_tests vhca tests/vhca
}

# build_floor: what stands in for the module in the benchmark, to the directory of the module
build_floor() {
	step 'Module ib_floor.ko, the least that a driver can do'
	build_for_tests floor tests/floor
}

# cargo_in_root [IN-ROOT OPTION]... -- ARGUMENTS...: prints, as words ended by
# NUL, a cargo command on the workspace of the tests
cargo_in_root() {
	local options=()
	while [ "$1" != -- ]; do
		options+=("$1")
		shift
	done
	shift
	printf '%s\0' "${in_checkout[@]}" -b "$CARGO" "${options[@]}" \
		-e "CARGO_HOME=$CARGO" -e "CARGO_TARGET_DIR=$TARGET" -e CARGO_TERM_COLOR=never \
		"$ROOT" cargo --config "build.jobs=$JOBS" "$@"
}

# crates_ready: fetches the crates that the tests' lock file names; with the
# shared part of the cache locked, as all checkouts share them
crates_ready() {
	local stamp command=()
	step 'Crates of the tests'
	[ -f "$TOP/tests/Cargo.lock" ] || die "there is no tests/Cargo.lock in $TOP."
	stamp=$CARGO/fetched-$(key "$TOP/tests/Cargo.lock")
	if [ -f "$stamp" ]; then
		step_end 'there'
		return
	fi
	mkdir -p "$CARGO" "$TARGET"
	mapfile -d '' command < <(cargo_in_root -n -- fetch --locked --manifest-path "$TOP/tests/Cargo.toml")
	retry crates "${command[@]}"
	: >"$stamp"
	step_end 'fetched'
}

# cargo_build LOG CARGO_OPTION...: builds what the options choose of the tests' workspace
cargo_build() {
	local command=() log=$1
	shift
	mkdir -p "$TARGET"
	mapfile -d '' command < <(cargo_in_root -- build --offline --locked --release --manifest-path "$TOP/tests/Cargo.toml" "$@")
	run "$log" "${command[@]}"
}

# build_demo: what "make run" does in the guest, with the fabric that it shows
build_demo() {
	step 'Demo'
	cargo_build demo --package umad-demo --package umadctl --package ibsim-bridge --package ib-topology
	step_end 'built'
}

# build_bench: what "make bench" does in the guest
build_bench() {
	step 'Benchmark'
	cargo_build bench --package umad-bench
	step_end 'built'
}

# build_fuzz: the fuzzer
build_fuzz() {
	step 'Fuzzer'
	cargo_build fuzzer --package umad-fuzz
	step_end 'built'
}

# build_tests CARGO_OPTION...: what the options choose of the tests' workspace; the 32-bit ABI checks; and the list of areas
build_tests() {
	local f
	step 'Tests'
	cargo_build tests "$@"
	cargo_build tests-32 --target i686-unknown-linux-gnu --bin abi32
	for f in "$TOP"/tests/{selftests,fuzz}/src/bin/*.rs; do
		f=${f##*/}
		# It wants a kernel started in a way of its own, see suite.sh.
		[ "$f" != stale.rs ] || continue
		printf '%s\n' "${f%.rs}"
	done >"$OUT/areas"
	echo abi32-i686 >>"$OUT/areas"
	step_end "built: $(wc -l <"$OUT/areas") areas"
}

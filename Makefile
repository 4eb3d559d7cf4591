# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#
# For people; the kernel's build system reads Kbuild. "make help" lists what there is.

KDIR ?= /lib/modules/$(shell uname -r)/build
export KDIR

# For the commands that choose a kernel themselves.
export KERNEL_RELEASE = $(KERNEL)
export UMAD_CACHE UMAD_MIRROR UMAD_ACCEL AREAS IMPL KERNELS IF_BUILT ROUNDS CALL INSTALL_MOD_PATH FABRIC MUTANTS CALLS SEED ON
# Where make was called, also with -C: a relative FABRIC is meant from there.
export CALLED_IN = $(PWD)

.PHONY: modules modules_install clean help kernel update run test test-debug test-fabric test-install matrix mutants fuzz report bench profile deb shell umadctl lint fmt doc distclean

modules modules_install:
	+@scripts/module $@

clean kernel update run test test-debug test-fabric test-install matrix mutants fuzz report bench profile deb shell umadctl lint fmt doc distclean:
	@scripts/$@

help:
	@echo 'In a guest, with everything that is needed set up by itself (root, Debian 12 or 13, amd64):'
	@echo '  run              build the module, boot a stock Debian kernel, exchange MADs, and let OpenSM'
	@echo '                   bring up a simulated InfiniBand fabric of 280 nodes through it'
	@echo '                   (FABRIC=FILE: a fabric of your own, as ibnetdiscover prints it)'
	@echo '  test             linters, unit tests, all selftests and the programs of the field, on the C module and on ours'
	@echo '                   (AREAS="read write programs" and IMPL="rust" choose; a wrong name lists all)'
	@echo '  test-debug       the selftests on a kernel that looks for faults: KASAN, lockdep, kmemleak,'
	@echo '                   fault injection, KUnit; the kernel is built the first time (AREAS, IMPL)'
	@echo '  test-fabric      OpenSM on a fabric of more than a thousand nodes, on both modules'
	@echo '  test-install     the package on an installed Debian 13: install, reboot, upgrade the kernel, purge'
	@echo '  matrix           the module, and some areas of the selftests, on each series of backports kernels'
	@echo '                   (KERNELS="RELEASE ..." and AREAS choose)'
	@echo '  mutants          can the tests fail? small faults, put into our module one at a time, have to be noticed'
	@echo '                   (MUTANTS="name ..." chooses among tests/mutants)'
	@echo '  fuzz             random calls, led by coverage, on the kernel that looks for faults'
	@echo '                   (CALLS=200000 and SEED=1 choose; ON=stock: on the stock kernel, faster, without coverage)'
	@echo '  report           figures: what bad processes, bad peers and missing devices do to others, on both modules;'
	@echo '                   how many fault points were tried; what the fuzzer did and reached (CALLS, SEED)'
	@echo '  bench            what calls cost on the C module and on ours, in executed instructions'
	@echo '                   (ROUNDS=5 instead of 3); writes Documentation/costs.rst'
	@echo '  profile          which functions the instructions of a call are in (CALL=vfs_read, IMPL=c choose)'
	@echo '  shell            a shell in the guest, with the module loaded'
	@echo '  umadctl          build umadctl, a program that looks into ib_umad, with its man pages'
	@echo '  lint, fmt        only the linters; lay out the Rust code'
	@echo '  doc              render Documentation/ to HTML, and draw its pictures'
	@echo '  update           look for a newer kernel'
	@echo '  distclean        remove all that was set up ($$UMAD_CACHE, by default /var/cache/umad-rs)'
	@echo
	@echo 'For a kernel of your own:'
	@echo '  modules          build ib_umad.ko (default target); KDIR=DIR is the kernel tree,'
	@echo '                   by default /lib/modules/RELEASE/build of the running kernel'
	@echo '  modules_install  install it to updates/ of that kernel'
	@echo '  deb              build the Debian package, which has dkms build and install for each kernel'
	@echo '  kernel           prepare a tree for KDIR=, as Debian ships none that Rust modules can be built in'
	@echo '                   (KERNEL=RELEASE; by default the running kernel, or the newest of trixie-backports)'
	@echo '  clean            remove what was built from this checkout'

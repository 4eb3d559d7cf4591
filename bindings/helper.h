/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What bindgen reads: the kernel headers that the abstractions stand on, and an inline function
 * for each thing that C offers only as a macro.
 */
#ifndef UMAD_BINDINGS_HELPER_H
#define UMAD_BINDINGS_HELPER_H

#include <linux/cdev.h>
#include <linux/compat.h>
#include <linux/completion.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/idr.h>
#include <linux/kdev_t.h>
#include <linux/nospec.h>
#include <linux/poll.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/wait.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_smi.h>
#include <rdma/ib_user_mad.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_netlink.h>

/*
 * Declared in ib_verbs.h, defined in drivers/infiniband/core/core_priv.h, which is not among the
 * headers that a distribution ships.
 */
struct ib_client_nl_info {
	struct sk_buff *nl_msg;
	struct device *cdev;
	u32 port;
	u64 abi;
};

/* array_index_nospec() is a macro. */
static inline unsigned long umad_array_index_nospec(unsigned long index, unsigned long size)
{
	return array_index_nospec(index, size);
}

/* MKDEV() is a macro. */
static inline dev_t umad_mkdev(unsigned int major, unsigned int minor)
{
	return MKDEV(major, minor);
}

/* wake_up_interruptible() and wake_up_interruptible_all() are macros. */
static inline void umad_wake_up_interruptible_all(struct wait_queue_head *wq)
{
	wake_up_interruptible_all(wq);
}

#endif

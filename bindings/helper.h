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
#include <linux/instrumented.h>
#include <linux/jiffies.h>
#include <linux/kcov.h>
#include <linux/kdev_t.h>
#include <linux/netdevice.h>
#include <linux/nospec.h>
#include <linux/poll.h>
#include <linux/ratelimit.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/uaccess.h>
#include <linux/unaligned.h>
#include <linux/wait.h>
#include <net/ip6_fib.h>
#include <net/net_namespace.h>
#include <net/netevent.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_smi.h>
#include <rdma/ib_user_mad.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_netlink.h>

#include "trace.h"

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

/*
 * Members of anonymous unions: bindgen numbers these, and the numbers change with every member that
 * a kernel version adds.
 */
static inline struct cdev *umad_inode_cdev(const struct inode *inode)
{
	return inode->i_cdev;
}

static inline struct device *umad_ib_device_parent(const struct ib_device *ibdev)
{
	return ibdev->dev.parent;
}

static inline void umad_attribute_group_set(struct attribute_group *group,
					    struct attribute **attrs)
{
	group->attrs = attrs;
}

static inline void umad_device_attribute_set_show(struct device_attribute *attr,
						  ssize_t (*show)(struct device *dev,
								  struct device_attribute *attr,
								  char *buf))
{
	attr->show = show;
}

#ifdef CONFIG_KCOV
static inline u32 umad_kcov_handle(void)
{
	return kcov_common_handle().val;
}

/* Begins a section of coverage, if a thread of the kernel asks for it on behalf of somebody. */
static inline bool umad_kcov_begin(u32 handle)
{
	if (!handle || !(current->flags & PF_KTHREAD))
		return false;
	kcov_remote_start(kcov_remote_handle(KCOV_SUBSYSTEM_COMMON, handle));
	return true;
}

static inline void umad_kcov_end(void)
{
	kcov_remote_stop();
}
#endif

/* Limits are macros. One for all that programs can cause. */
static inline bool umad_may_log(void)
{
	static DEFINE_RATELIMIT_STATE(limit, DEFAULT_RATELIMIT_INTERVAL, DEFAULT_RATELIMIT_BURST);

	return ___ratelimit(&limit, KBUILD_MODNAME);
}

/* HZ is a macro, and the kernel crate's has the value of user space. */
enum { UMAD_HZ = HZ };

/* A variable that changes by itself. */
static inline unsigned long umad_jiffies(void)
{
	return jiffies;
}

/*
 * Numbers that change with the routes of a namespace, which are members of structures that bindgen does
 * not read: the generations that the caches of both families go by, and, since the removal of an IPv6
 * route does not change its one, the number of these.
 */
struct umad_routes {
	int ipv4;
	int ipv6;
	unsigned int ipv6_entries;
};

/*
 * Reads the numbers of the namespace that the network device of a GID is in; false if it has none (any
 * more). An entry of the GID table loses its device when it is removed.
 */
static inline bool umad_gid_routes(const struct ib_gid_attr *attr, struct umad_routes *routes)
{
	const struct net_device *ndev;

	rcu_read_lock();
	ndev = rcu_dereference(attr->ndev);
	if (ndev) {
		const struct net *net = dev_net(ndev);
#if IS_ENABLED(CONFIG_IPV6)
		/* Null if IPv6 is disabled at boot. */
		const struct rt6_statistics *stats = READ_ONCE(net->ipv6.rt6_stats);
#endif

		routes->ipv4 = rt_genid_ipv4(net);
#if IS_ENABLED(CONFIG_IPV6)
		routes->ipv6 = rt_genid_ipv6(net);
		routes->ipv6_entries = stats ? READ_ONCE(stats->fib_rt_entries) : 0;
#else
		routes->ipv6 = 0;
		routes->ipv6_entries = 0;
#endif
	}
	rcu_read_unlock();
	return ndev;
}

/*
 * Copies to and from a program. MADs are short: word by word takes fewer instructions than copy_to_user() and
 * copy_from_user(), whose "rep movsb" steps through the bytes. There is no check of the kernel's side as
 * hardened usercopy makes it: the caller has a slice. After a fault, some of it may have been copied.
 */
#define UMAD_PUT(type, at) \
	unsafe_put_user(get_unaligned((const type *)from + (at)), (type __user *)to + (at), fault)
#define UMAD_GET(type, at) \
	do { \
		type value; \
\
		unsafe_get_user(value, (const type __user *)from + (at), fault); \
		put_unaligned(value, (type *)to + (at)); \
	} while (0)
#define UMAD_STEP(bytes) (n -= (bytes), to += (bytes), from += (bytes))
#define UMAD_COPY(one) \
	do { \
		for (; n >= 8 * sizeof(long); UMAD_STEP(8 * sizeof(long))) { \
			one(unsigned long, 0); \
			one(unsigned long, 1); \
			one(unsigned long, 2); \
			one(unsigned long, 3); \
			one(unsigned long, 4); \
			one(unsigned long, 5); \
			one(unsigned long, 6); \
			one(unsigned long, 7); \
		} \
		for (; n >= sizeof(long); UMAD_STEP(sizeof(long))) \
			one(unsigned long, 0); \
		for (; n >= sizeof(int); UMAD_STEP(sizeof(int))) \
			one(unsigned int, 0); \
		for (; n; UMAD_STEP(1)) \
			one(unsigned char, 0); \
	} while (0)

static inline bool umad_write_user(void __user *to, const void *from, unsigned long n)
{
	might_fault();
	instrument_copy_to_user(to, from, n);
	if (should_fail_usercopy() || !user_write_access_begin(to, n))
		return false;
	UMAD_COPY(UMAD_PUT);
	user_write_access_end();
	return true;
fault:
	user_write_access_end();
	return false;
}

static inline bool umad_read_user_raw(void *to, const void __user *from, unsigned long n)
{
	if (!user_read_access_begin(from, n))
		return false;
	UMAD_COPY(UMAD_GET);
	user_read_access_end();
	return true;
fault:
	user_read_access_end();
	return false;
}

static inline bool umad_read_user(void *to, const void __user *from, unsigned long n)
{
	might_fault();
	if (should_fail_usercopy())
		return false;
	return umad_read_user_raw(to, from, n);
}

/* Fails instead of waiting for a page. */
static inline bool umad_read_user_nofault(void *to, const void __user *from, unsigned long n)
{
	bool done;

	pagefault_disable();
	done = !should_fail_usercopy() && umad_read_user_raw(to, from, n);
	pagefault_enable();
	return done;
}

/*
 * wake_up_interruptible() and wake_up_interruptible_all() are macros. Whoever waits or polls queues
 * itself before it looks for what it waits for, with a barrier between.
 */
static inline void umad_wake_up_interruptible(struct wait_queue_head *wq)
{
	if (wq_has_sleeper(wq))
		wake_up_interruptible(wq);
}

static inline void umad_wake_up_interruptible_all(struct wait_queue_head *wq)
{
	if (wq_has_sleeper(wq))
		wake_up_interruptible_all(wq);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What bindgen reads: the headers of ib_umad's abstractions, some of which are shared, those that a
 * driver of an RDMA device needs, and an inline function for each thing that C offers only as a macro.
 */
#ifndef VHCA_BINDINGS_HELPER_H
#define VHCA_BINDINGS_HELPER_H

#include "../../../bindings/helper.h"

#include <linux/bottom_half.h>
#include <linux/nsproxy.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>
#include <net/net_namespace.h>

/* spin_lock_irqsave() is a macro that writes to its second argument. */
static inline unsigned long vhca_spin_lock_irqsave(spinlock_t *lock)
{
	unsigned long flags;

	spin_lock_irqsave(lock, flags);
	return flags;
}

/* As above; returns whether it got the lock. */
static inline int vhca_spin_trylock_irqsave(spinlock_t *lock, unsigned long *flags)
{
	unsigned long got;
	int locked = spin_trylock_irqsave(lock, got);

	*flags = got;
	return locked;
}

/* spin_unlock_irqrestore() has a wrapper for lockdep's sake. */
static inline void vhca_spin_unlock_irqrestore(spinlock_t *lock, unsigned long flags)
{
	spin_unlock_irqrestore(lock, flags);
}

/* These two have lockdep's and the caller's address in them, and so are inline. */
static inline void vhca_bh_disable(void)
{
	local_bh_disable();
}

static inline void vhca_bh_enable(void)
{
	local_bh_enable();
}

/* INIT_DELAYED_WORK() is a macro. */
static inline void vhca_init_delayed_work(struct delayed_work *work, work_func_t func)
{
	INIT_DELAYED_WORK(work, func);
}

/* mod_delayed_work() with the queue for work that any processor may do. */
static inline void vhca_schedule_work(struct delayed_work *work, unsigned int ms)
{
	mod_delayed_work(system_unbound_wq, work, msecs_to_jiffies(ms));
}

/* _ib_alloc_device() is behind a macro; devices begin in the initial namespace. */
static inline struct ib_device *vhca_alloc_device(size_t size)
{
	return _ib_alloc_device(size, &init_net);
}

/*
 * ib_core gives a switch a table of ports with one entry, for port 0; and yet some of its clients look
 * up port 1 in it. A table that is made before the device is known to be a switch has an entry for each
 * port; that of port 0 is left to be initialised. To be called with phys_port_cnt set, is_switch not.
 */
static inline int vhca_make_switch(struct ib_device *device)
{
	struct ib_port_data *pdata;
	int ret;

	ret = ib_device_set_netdev(device, NULL, 1);
	if (ret)
		return ret;
	pdata = &device->port_data[0];
	pdata->ib_dev = device;
	spin_lock_init(&pdata->pkey_list_lock);
	INIT_LIST_HEAD(&pdata->pkey_list);
	spin_lock_init(&pdata->netdev_lock);
	INIT_HLIST_NODE(&pdata->ndev_hash_link);
	device->is_switch = 1;
	return 0;
}

/* The device is in an anonymous union, see the other helper.h. */
static inline const char *vhca_device_name(const struct ib_device *device)
{
	return dev_name(&device->dev);
}

/* ERR_PTR() is inline; for the operations that return pointers. */
static inline void *vhca_err_ptr(long error)
{
	return ERR_PTR(error);
}

#endif

/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The tracepoints of ib_umad: those of the kernel's own header, and ours. The kernel's header looks into
 * structures that it does not define; these have what it looks for. They live as long as a call.
 */
#ifndef UMAD_BINDINGS_TRACE_H
#define UMAD_BINDINGS_TRACE_H

#include <linux/types.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_user_mad.h>

struct umad_traced_device {
	u32 index;
};

struct ib_umad_port {
	const struct umad_traced_device *ib_dev;
	u32 port_num;
};

struct ib_umad_file {
	const struct ib_umad_port *port;
};

#include <trace/events/ib_umad.h>
#include "trace_drop.h"

#endif

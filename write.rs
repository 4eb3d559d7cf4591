// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause

//! write(): sending a MAD.
//!
//! The headers are copied from the program first, with nothing held: no lock, no agent, no send buffer.
//! Then the agent is borrowed, which its unregistering waits for, for as long as it takes to resolve the
//! address, fill a send buffer and post it. The rest of the MAD is copied straight into the send buffer
//! if that needs no waiting. If it does, all is let go, the rest is copied into memory of its own, and
//! the same is done again with that. Errors are those, and in that order, that a program knows from
//! copying piece by piece.

#![forbid(unsafe_code)]

use crate::{
    abi,
    agents::Handler,
    bounds,
    chrdev::{
        file::TaskName,
        log::is_message_allowed,
        user::UserBytes, //
    },
    compat,
    file::{
        SendBudget,
        UmadFile, //
    },
    outstanding::SendKey,
    packet::Packet,
    rdma::{
        address::{
            Address,
            GlobalRoute, //
        },
        mad::{
            self,
            MadHeader,
            MAD_HDR_LEN,
            RMPP_FLAG_ACTIVE,
            RMPP_HDR_LEN, //
        },
        send::{
            SendMad,
            Shape, //
        },
        trace::{
            self,
            DropReason,
            Traced, //
        }, //
    },
    seat::AgentId,
    uapi::{
        Layout,
        PacketHeader,
        HEADER_LEN,
        OLD_HEADER_LEN, //
    }, //
};
use kernel::{
    alloc::AllocError,
    dev_notice,
    prelude::*,
    str::BStr, //
};

/// Bytes of the largest MAD that is not sent by RMPP: one of OPA.
const MAX_SINGLE_MAD: usize = 2048;

/// Sends the MAD that is written, returns the number of bytes.
///
/// # Errors
///
/// In this order: `EINVAL` if it is shorter than packet header and RMPP header; `EFAULT` if the packet
/// header cannot be read; `EINVAL` for an agent id that cannot be; `EFAULT` if the RMPP header cannot be
/// read; `EINVAL` for a header that the ABI's version does not allow; `EIO` if there is no such agent (any
/// more); `EMSGSIZE` for a message over the bound, and `ENOBUFS` if the file's sends would be over theirs, see
/// [`bounds`]; `EINVAL` if the MAD is shorter than its class's headers; what [`UmadFile::address_handle`] says; `EINVAL`
/// if it is too long for one MAD and not sent by RMPP; `ENOMEM`; `EFAULT` if the rest cannot be read;
/// `EINVAL` for a duplicate, see [`crate::outstanding`]; what posting says (`EINVAL` for a class without
/// RMPP from an agent with RMPP, among others).
pub(crate) fn write(file: &UmadFile, from: UserBytes) -> Result<usize> {
    let count = from.len();
    let layout = file.layout();
    let mad_len = count
        .checked_sub(layout.header_len())
        .filter(|len| *len >= RMPP_HDR_LEN)
        .ok_or(EINVAL)?;
    let (header, head) = read_heads(&from, layout)?;
    let id = AgentId::from_user(header.id)?;
    if !abi::is_header_allowed(&header) {
        return Err(old_header(file));
    }
    let written = Written::new(header, head, mad_len);
    trace::written(|| written.traced(file));
    let rest = from.skip(layout.header_len() + RMPP_HDR_LEN);
    match send_all(file, id, &written, rest) {
        Ok(()) => Ok(count),
        Err(why) => {
            let (error, reason) = why.tell(file);
            trace::dropped(reason, Some(error), || written.traced(file));
            Err(error)
        }
    }
}

/// Refuses what is likely to have a header of 56 bytes where there is only the other one.
#[cold]
fn old_header(file: &UmadFile) -> Error {
    if is_message_allowed() {
        dev_notice!(
            file.node(),
            "process {}: its headers seem to have 56 bytes; with abi_version=6 they have 64, reserved bytes are zero\n",
            BStr::from_bytes(TaskName::current().as_bytes())
        );
    }
    EINVAL
}

/// Sends what was written; copies the rest first, if it cannot be sent without.
fn send_all(
    file: &UmadFile,
    id: AgentId,
    written: &Written,
    rest: UserBytes,
) -> core::result::Result<(), NotSent> {
    let mut budget = None;
    match send(file, id, written, Rest::Users(rest), &mut budget) {
        Err(NotSent::NotPresent) => {
            // The budget stays: it covers this memory.
            let mut copied = KVVec::new();
            rest.reader().read_all(&mut copied, GFP_KERNEL_ACCOUNT)?;
            send(file, id, written, Rest::Copied(&copied), &mut budget)
        }
        done => done,
    }
}

/// Why a MAD was not sent.
enum NotSent {
    /// A page of the rest is not there; it can be copied with nothing held.
    NotPresent,
    /// The same transaction is outstanding.
    Duplicate,
    /// This is the program's to know.
    Refused(Error),
}

impl NotSent {
    /// What the program is told, and what who traces it.
    fn tell(self, file: &UmadFile) -> (Error, DropReason) {
        let error = match self {
            NotSent::Duplicate => return (EINVAL, DropReason::Duplicate),
            NotSent::NotPresent => EFAULT,
            NotSent::Refused(e) => e,
        };
        let reason = match error {
            e if e == EFAULT => DropReason::CopyFailed,
            e if e == EMSGSIZE => DropReason::TooLong,
            e if e == compat::enobufs() => DropReason::TooManySends,
            e if e == ENOMEM => DropReason::NoMemory,
            e if e == EIO && file.port().is_live() => DropReason::AgentGone,
            e if e == EIO => DropReason::FileGone,
            _ => DropReason::Refused,
        };
        (error, reason)
    }
}

impl From<Error> for NotSent {
    fn from(e: Error) -> Self {
        Self::Refused(e)
    }
}

impl From<AllocError> for NotSent {
    fn from(e: AllocError) -> Self {
        Self::Refused(e.into())
    }
}

/// The MAD behind its RMPP header.
enum Rest<'a> {
    /// In the program's memory.
    Users(UserBytes),
    /// In memory of its own.
    Copied(&'a [u8]),
}

impl Rest<'_> {
    /// Copies from an offset on.
    ///
    /// # Errors
    ///
    /// [`NotSent::NotPresent`].
    fn copy(&self, offset: usize, to: &mut [u8]) -> core::result::Result<(), NotSent> {
        let done = match self {
            Rest::Users(bytes) => bytes.copy_if_present(offset, to),
            Rest::Copied(bytes) => match bytes.get(offset..).and_then(|b| b.get(..to.len())) {
                Some(from) => {
                    to.copy_from_slice(from);
                    true
                }
                None => false,
            },
        };
        if done {
            Ok(())
        } else {
            Err(NotSent::NotPresent)
        }
    }
}

/// MAD header and RMPP header, or what is there in other classes.
type Head = [u8; RMPP_HDR_LEN];

/// Reads packet header and MAD's head; what the old layout of the former lacks is zero.
fn read_heads(from: &UserBytes, layout: Layout) -> Result<(PacketHeader, Head)> {
    // At once, if all of it can be read.
    let both = match layout {
        Layout::PKeyIndex => from.first().map(split),
        Layout::Old => from.first().map(split_old),
    };
    let (header, head) = match both {
        Ok(Some(both)) => both,
        // What is wrong with the header is told first.
        _ => {
            let mut reader = from.reader();
            let header = match layout {
                Layout::PKeyIndex => reader.read()?,
                Layout::Old => pad(reader.read()?),
            };
            AgentId::from_user(parse(&header)?.id)?;
            (header, reader.read()?)
        }
    };
    Ok((parse(&header)?, head))
}

fn split(both: [u8; HEADER_LEN + RMPP_HDR_LEN]) -> Option<([u8; HEADER_LEN], Head)> {
    let (header, head) = both.split_first_chunk()?;
    Some((*header, *head.first_chunk()?))
}

fn split_old(both: [u8; OLD_HEADER_LEN + RMPP_HDR_LEN]) -> Option<([u8; HEADER_LEN], Head)> {
    let (header, head) = both.split_first_chunk()?;
    Some((pad(*header), *head.first_chunk()?))
}

fn pad(old: [u8; OLD_HEADER_LEN]) -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    if let Some(begin) = header.first_chunk_mut() {
        *begin = old;
    }
    header
}

fn parse(header: &[u8; HEADER_LEN]) -> Result<PacketHeader> {
    PacketHeader::read_from_bytes(header).map_err(|_| EINVAL)
}

/// What a program wrote, but for the rest of the MAD.
struct Written {
    header: PacketHeader,
    head: Head,
    mad_len: usize,
    is_rmpp_class: bool,
    /// Class and RMPP flags say that the MAD takes part in RMPP.
    wants_rmpp: bool,
}

impl Written {
    fn new(header: PacketHeader, head: Head, mad_len: usize) -> Self {
        let [_, mgmt_class, .., flags, _, _, _, _, _, _, _, _, _] = head;
        let is_rmpp_class = mad::is_rmpp_class(mgmt_class);
        Self {
            header,
            head,
            mad_len,
            is_rmpp_class,
            wants_rmpp: is_rmpp_class && flags & RMPP_FLAG_ACTIVE != 0,
        }
    }

    /// What the send costs until it is done, if `ib_mad` does RMPP for its agent or if not.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the message is over the bound.
    fn cost(&self, kernel_rmpp: bool) -> Result<usize> {
        // What is too long for one MAD and is not sent by RMPP is refused later, whatever is in it.
        if self.mad_len > MAX_SINGLE_MAD && !(kernel_rmpp && self.wants_rmpp) {
            return Ok(bounds::send_cost(0));
        }
        if !bounds::is_message_allowed(self.mad_len) {
            return Err(EMSGSIZE);
        }
        Ok(bounds::send_cost(self.mad_len))
    }

    fn mad_header(&self) -> MadHeader {
        let (header, _) = split_head(&self.head);
        MadHeader::from_array(*header)
    }

    /// What tracepoints tell of it.
    fn traced(&self, file: &UmadFile) -> Traced {
        file.port().traced(self.header, self.mad_header())
    }

    fn address(&self) -> Address {
        let header = &self.header;
        Address {
            lid: u16::from_be(header.lid_be),
            sl: header.sl,
            path_bits: header.path_bits,
            global: (header.grh_present != 0).then(|| GlobalRoute {
                gid: header.gid,
                gid_index: header.gid_index,
                flow_label: u32::from_be(header.flow_label_be),
                hop_limit: header.hop_limit,
                traffic_class: header.traffic_class,
            }),
        }
    }
}

/// MAD header, and RMPP header.
fn split_head(head: &Head) -> (&[u8; MAD_HDR_LEN], &[u8; RMPP_HDR_LEN - MAD_HDR_LEN]) {
    const {
        assert!(MAD_HDR_LEN == 24 && RMPP_HDR_LEN == 36);
    }
    match head.split_first_chunk() {
        Some((header, rest)) => match rest.first_chunk() {
            Some(rmpp) => (header, rmpp),
            None => (header, &[0; RMPP_HDR_LEN - MAD_HDR_LEN]),
        },
        None => (&[0; MAD_HDR_LEN], &[0; RMPP_HDR_LEN - MAD_HDR_LEN]),
    }
}

/// Sends what was written from an agent that is borrowed for the time of the call.
fn send<'a>(
    file: &'a UmadFile,
    id: AgentId,
    written: &Written,
    rest: Rest<'_>,
    budget: &mut Option<SendBudget<'a>>,
) -> core::result::Result<(), NotSent> {
    let mut header = written.mad_header();
    // What a send needs besides `ib_mad`'s own is charged to the program, which may be made to wait for it,
    // so it is got before the agent is borrowed.
    let memory = Packet::memory()?;
    file.get_memory_that_is_wanted();
    let is_response = header.is_response();
    let hdr_len = mad::class_header_len(header.mgmt_class());
    let address = written.address();
    let (agent, seat, handle) = file.borrow_agent(
        id,
        &address,
        |kernel_rmpp| written.cost(kernel_rmpp),
        budget,
    )?;
    let data_len = written.mad_len.checked_sub(hdr_len).ok_or(EINVAL)?;
    let kernel_rmpp = agent.kernel_rmpp();
    let rmpp = kernel_rmpp && written.wants_rmpp;

    let ah = file.address_handle(&agent, &address, handle)?;
    let mut mad = SendMad::new(
        &agent,
        Shape {
            remote_qpn: u32::from_be(written.header.qpn_be),
            pkey_index: written.header.pkey_index,
            rmpp,
            hdr_len,
            data_len,
            base_version: header.base_version(),
        },
    )?;
    // The upper half of a request's transaction id makes it unique among all agents, and leads the
    // response back to this one. A response has that of its request.
    if !is_response {
        header.set_hi_tid(agent.hi_tid());
    }
    // `ib_mad` keeps the RMPP header of its own agents.
    let keep_rmpp = kernel_rmpp && written.is_rmpp_class;
    fill(&mut mad, written, &header, &rest, rmpp, keep_rmpp)?;

    let key = SendKey::new(&written.header, &header, is_response);
    let cost = budget.as_ref().map_or(0, SendBudget::cost);
    // A plain response is on its way when it is posted, see `crate::outstanding`.
    let list = written.wants_rmpp || written.header.timeout_ms != 0 || !is_response;
    let listed = list.then_some(key);
    let send = Packet::sent(memory, seat, &written.header, header, listed, cost)?;
    // An agent that does RMPP itself sends many MADs with one transaction id.
    let user_segment = !kernel_rmpp && written.wants_rmpp;
    file.begin_send(&key, budget, list, !user_segment)
        .map_err(|e| match e {
            e if e == EINVAL => NotSent::Duplicate,
            e => NotSent::Refused(e),
        })?;
    mad.post(ah, written.header.timeout_ms, written.header.retries, send)
        .map_err(|(e, send)| {
            file.abort_send(&send);
            e
        })?;
    Ok(())
}

/// Copies the MAD into the send buffer.
fn fill(
    mad: &mut SendMad<'_, Handler>,
    written: &Written,
    header: &MadHeader,
    rest: &Rest<'_>,
    rmpp: bool,
    keep_rmpp: bool,
) -> core::result::Result<(), NotSent> {
    let bytes = mad.bytes_mut();
    // Every MAD has room for both headers: `Written` is at least as long, and classes with RMPP have
    // longer ones.
    let (first, left) = bytes.split_first_chunk_mut::<MAD_HDR_LEN>().ok_or(EINVAL)?;
    *first = *header.as_bytes();
    let (second, left) = left.split_first_chunk_mut().ok_or(EINVAL)?;
    if !keep_rmpp {
        *second = *split_head(&written.head).1;
    }
    rest.copy(0, left)?;
    if rmpp {
        let begin = left.len();
        let end = written.mad_len - RMPP_HDR_LEN;
        let mut offset = begin;
        for segment in mad.segments_mut() {
            let len = segment.len().min(end.saturating_sub(offset));
            rest.copy(offset, segment.get_mut(..len).unwrap_or(&mut []))?;
            offset += len;
        }
    }
    Ok(())
}

#[kunit_tests(umad_write)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    /// Subnet administration, which has RMPP headers, and performance management, which has not.
    const SA: u8 = 0x03;
    const PERFORMANCE: u8 = 0x04;

    /// A MAD of a class, so long, with these RMPP flags (or what is there in other classes).
    fn written(class: u8, rmpp_flags: u8, mad_len: usize) -> Written {
        let mut head = [0; RMPP_HDR_LEN];
        let [_, at_class, .., at_flags, _, _, _, _, _, _, _, _, _] = &mut head;
        (*at_class, *at_flags) = (class, rmpp_flags);
        Written::new(PacketHeader::new_zeroed(), head, mad_len)
    }

    #[test]
    fn rmpp_wants_class_and_flag() {
        assert!(written(SA, RMPP_FLAG_ACTIVE, 256).wants_rmpp);
        assert!(written(SA, RMPP_FLAG_ACTIVE | 2, 256).wants_rmpp);
        assert!(!written(SA, 2, 256).wants_rmpp);
        assert!(!written(PERFORMANCE, RMPP_FLAG_ACTIVE, 256).wants_rmpp);
    }

    #[test]
    fn a_message_costs_its_bytes_and_may_be_too_long() {
        let long = written(SA, RMPP_FLAG_ACTIVE, MAX_SINGLE_MAD + 1);
        assert!(long.cost(true) == Ok(bounds::send_cost(MAX_SINGLE_MAD + 1)));
        let huge = written(SA, RMPP_FLAG_ACTIVE, usize::MAX);
        assert!(huge.cost(true) == Err(EMSGSIZE));
        let single = written(PERFORMANCE, 0, MAX_SINGLE_MAD);
        assert!(single.cost(false) == Ok(bounds::send_cost(MAX_SINGLE_MAD)));
    }

    #[test]
    fn what_is_refused_for_its_length_later_costs_nothing_of_it() {
        for (written, kernel_rmpp) in [
            (written(SA, RMPP_FLAG_ACTIVE, usize::MAX), false),
            (written(SA, 0, usize::MAX), true),
            (
                written(PERFORMANCE, RMPP_FLAG_ACTIVE, MAX_SINGLE_MAD + 1),
                true,
            ),
        ] {
            assert!(written.cost(kernel_rmpp) == Ok(bounds::send_cost(0)));
        }
    }

    #[test]
    fn the_old_header_has_zeroes_where_it_ends() {
        let both = [0xff; OLD_HEADER_LEN + RMPP_HDR_LEN];
        let Some((header, head)) = split_old(both) else {
            return assert!(false);
        };
        let set = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == 0xff).count();
        assert_eq!(set(&header), OLD_HEADER_LEN);
        assert_eq!(set(&head), RMPP_HDR_LEN);
        assert!(header.iter().skip(OLD_HEADER_LEN).all(|byte| *byte == 0));
    }

    #[test]
    fn a_copied_rest_is_not_read_past_its_end() {
        let rest = Rest::Copied(&[1, 2, 3]);
        let mut to = [0; 2];
        assert!(rest.copy(1, &mut to).is_ok());
        assert_eq!(to, [2, 3]);
        assert!(matches!(rest.copy(2, &mut to), Err(NotSent::NotPresent)));
        assert!(matches!(rest.copy(9, &mut to), Err(NotSent::NotPresent)));
        assert_eq!(to, [2, 3]);
    }
}

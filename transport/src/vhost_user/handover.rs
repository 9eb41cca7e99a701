//! Describes a front-end to a successor process by the messages that the front-end itself would send after a reconnect,
//! with the same descriptors.
//!
//! So the successor checks all of the state as if it came from a front-end, and refuses it if it does not offer the
//! negotiated features. It knows nothing about how parcels are transported. Invariants: describing changes nothing; of
//! these messages, only the kicks have effects visible to the guest, and they are held back until the server is
//! started.

use std::os::fd::{AsFd, OwnedFd};

use zerocopy::{FromBytes, IntoBytes};

use super::connection::Connection;
use super::device::Device;
#[cfg(test)]
use super::kill_point;
use super::message::{Frame, HEADER_LEN, Header, InflightInfo, Message, RegionInfo, VringState};
use super::queue::Queue;
use super::session::Session;
use super::{Client, Log};
use crate::log::with_causes;
use crate::{HandoverError, Interest, Parcel, Watch, WatchKey};

/// The type of a parcel, in its first byte: the connection, with the received part of an incomplete message.
const CONNECTION: u8 = b'c';
/// A memory region that was removed and may be added again.
const REMOVED_REGION: u8 = b'g';
/// A message of the front-end.
const MESSAGE: u8 = b'm';

// Requests by their names in the specification.
const SET_FEATURES: u32 = 2;
const SET_LOG_BASE: u32 = 6;
const SET_LOG_FD: u32 = 7;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;

/// Serializes the state of a front-end.
pub fn save(client: &Client) -> Result<Vec<Parcel>, HandoverError> {
    let Client { connection, session } = client;
    if session.is_waiting() {
        return Err(HandoverError::NotNow("a queue is being stopped"));
    }
    let (stream, partial, fds) = connection.pending_message();
    let mut state = Parcels { parcels: Vec::new() };
    state.add(CONNECTION, partial, std::iter::once(stream).chain(fds.iter().map(AsFd::as_fd)))?;
    state.message(SET_FEATURES, session.features.as_bytes(), None)?;
    state.message(SET_PROTOCOL_FEATURES, session.protocol.as_bytes(), None)?;
    if let Some(backend) = &session.backend {
        state.message(SET_BACKEND_REQ_FD, &[], Some(backend.fd()))?;
    }
    let Device { table, region, dirty_log, log_fd, queues, .. } = &session.device;
    for (info, file) in table.descriptions() {
        state.message(ADD_MEM_REG, &[&[0; 8], info.as_bytes()].concat(), Some(file.as_fd()))?;
    }
    for info in session.device.removed_regions() {
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::RemovedRegionsOmitted) {
            continue;
        }
        state.add(REMOVED_REGION, info.as_bytes(), std::iter::empty())?;
    }
    #[cfg(test)]
    let region = &region.as_ref().filter(|_| !kill_point::is_planted(kill_point::Bug::RegionOmitted));
    if let Some(region) = region {
        let (InflightInfo { len, offset, queues, size }, file) = region.description();
        let payload = [len.as_bytes(), offset.as_bytes(), queues.as_bytes(), size.as_bytes()].concat();
        state.message(SET_INFLIGHT_FD, &payload, Some(file.as_fd()))?;
    }
    #[cfg(test)]
    let dirty_log = &dirty_log.as_ref().filter(|_| !kill_point::is_planted(kill_point::Bug::LogOmitted));
    if let Some(log) = dirty_log {
        let (info, file) = log.description();
        state.message(SET_LOG_BASE, info.as_bytes(), Some(file.as_fd()))?;
    }
    if let Some(fd) = log_fd {
        state.message(SET_LOG_FD, &[], Some(fd.as_fd()))?;
    }
    for (index, queue) in (0..).zip(queues) {
        state.queue(index, queue)?;
    }
    Ok(state.parcels)
}

struct Parcels {
    parcels: Vec<Parcel>,
}

impl Parcels {
    fn add<'a>(
        &mut self,
        what: u8,
        bytes: &[u8],
        fds: impl Iterator<Item = std::os::fd::BorrowedFd<'a>>,
    ) -> Result<(), HandoverError> {
        let descriptors = fds.map(|fd| fd.try_clone_to_owned()).collect::<Result<Vec<OwnedFd>, _>>();
        let descriptors = descriptors.map_err(|error| HandoverError::Failed("duplicate a descriptor", error))?;
        self.parcels.push(Parcel { bytes: [&[what], bytes].concat(), descriptors });
        Ok(())
    }

    fn message(
        &mut self,
        request: u32,
        payload: &[u8],
        fd: Option<std::os::fd::BorrowedFd<'_>>,
    ) -> Result<(), HandoverError> {
        let header = Header::of(request, 1, payload);
        self.add(MESSAGE, &[header.as_bytes(), payload].concat(), fd.into_iter())
    }

    fn queue(&mut self, index: u32, queue: &Queue) -> Result<(), HandoverError> {
        let state = |num: u32| VringState { queue: index, num };
        if queue.size > 0 {
            self.message(SET_VRING_NUM, state(u32::from(queue.size)).as_bytes(), None)?;
        }
        let base = queue.next_base();
        #[cfg(test)]
        let base = base.wrapping_add(if kill_point::is_planted(kill_point::Bug::BaseOfTaken) {
            queue.unanswered()
        } else {
            0
        });
        self.message(SET_VRING_BASE, state(u32::from(base)).as_bytes(), None)?;
        if let Some(place) = &queue.place {
            self.message(SET_VRING_ADDR, place.as_bytes(), None)?;
        }
        let fds = [(SET_VRING_CALL, queue.call()), (SET_VRING_ERR, queue.err.as_ref())];
        let number = u64::from(index);
        for (request, fd) in fds.into_iter().filter_map(|(request, fd)| Some((request, fd?))) {
            self.message(request, number.as_bytes(), Some(fd.as_fd()))?;
        }
        self.message(SET_VRING_ENABLE, state(u32::from(queue.enabled)).as_bytes(), None)?;
        // A broken queue is not started again unless the front-end does so.
        match queue.kick.as_ref().filter(|_| !queue.is_broken()) {
            Some(kick) => self.message(SET_VRING_KICK, number.as_bytes(), Some(kick.as_fd())),
            None => Ok(()),
        }
    }
}

/// Restores a front-end, except for its kicks, which start its rings.
pub fn restore(
    parcels: Vec<Parcel>,
    session: Session,
    log: &mut Log,
) -> Result<Option<(Client, Vec<Message>)>, HandoverError> {
    let mut parcels = parcels.into_iter();
    let Some(Parcel { bytes, descriptors }) = parcels.next() else { return Ok(None) };
    let mut descriptors = descriptors.into_iter();
    let (Some((&CONNECTION, partial)), Some(stream)) = (bytes.split_first(), descriptors.next()) else {
        return Err(unknown_format());
    };
    let connection = Connection::resumed(stream.into(), partial, descriptors.collect());
    let connection = connection.map_err(|error| HandoverError::Failed("continue with a connection", error))?;
    let mut client = Client { connection, session };
    let mut kicks = Vec::new();
    for Parcel { bytes, descriptors } in parcels {
        match bytes.split_first() {
            Some((&REMOVED_REGION, info)) => {
                client.session.device.region_removed(RegionInfo::read_from_bytes(info).map_err(|_| unknown_format())?);
            }
            Some((&MESSAGE, bytes)) => match message(bytes, descriptors)? {
                kick @ Message::SetVringKick(_) => kicks.push(kick),
                message => {
                    let refused = client.session.execute(message, &mut NoWatch, log);
                    refused.map_err(|refusal| HandoverError::Refused(with_causes(&refusal)))?;
                }
            },
            _ => return Err(unknown_format()),
        }
    }
    Ok(Some((client, kicks)))
}

fn message(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Message, HandoverError> {
    let (header, payload) = Header::read_from_prefix(bytes).map_err(|_| unknown_format())?;
    debug_assert_eq!(size_of_val(&header), HEADER_LEN);
    let message = Message::parse(Frame { header, payload: payload.to_vec(), fds });
    message.map_err(|why| HandoverError::Refused(why.to_string()))
}

fn unknown_format() -> HandoverError {
    HandoverError::Refused("the state handed over by the previous process has an unknown format".into())
}

/// Stands for the event loop before a server is started. Only kick messages need one.
struct NoWatch;

impl Watch for NoWatch {
    fn watch(&mut self, _: std::os::fd::BorrowedFd<'_>, _: Interest, _: WatchKey) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    fn forget(&mut self, _: WatchKey) {}
}

//! How a process describes its front-end to the one that takes its place: by the messages that the front-end itself
//! would send after a reconnect, with the same descriptors.
//!
//! So the next process checks all of it as if it came from a front-end, and one that does not offer what was negotiated
//! refuses it. Knows nothing of how parcels travel. Invariants: telling changes nothing; of what is told, only the
//! kicks start something that the guest can see, and they are kept until the server is started.

use std::os::fd::{AsFd, OwnedFd};

use zerocopy::{FromBytes, IntoBytes};

use super::connection::Connection;
use super::device::Device;
use super::message::{Frame, HEADER_LEN, Header, InflightInfo, Message, RegionInfo, VringState};
#[cfg(test)]
use super::moment;
use super::queue::Queue;
use super::session::Session;
use super::{Client, Log};
use crate::log::with_causes;
use crate::{HandoverError, Interest, Parcel, Watch, WatchKey};

/// What a parcel is, in its first byte: the connection, with the bytes of a message that has not come whole; a region
/// of memory that was taken away and may come back; a message.
const CONNECTION: u8 = b'c';
const GONE: u8 = b'g';
const MESSAGE: u8 = b'm';

/// Requests by their names in the specification.
const SET_FEATURES: u32 = 2;
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

/// All that there is to tell of a front-end.
pub fn told(client: &Client) -> Result<Vec<Parcel>, HandoverError> {
    let Client { connection, session } = client;
    if session.is_waiting() {
        return Err(HandoverError::NotNow("a queue is being stopped"));
    }
    let (stream, partial, fds) = connection.whole();
    let mut said = Said { parcels: Vec::new() };
    said.add(CONNECTION, partial, std::iter::once(stream).chain(fds.iter().map(AsFd::as_fd)))?;
    said.message(SET_FEATURES, session.features.as_bytes(), None)?;
    said.message(SET_PROTOCOL_FEATURES, session.protocol.as_bytes(), None)?;
    if let Some(backend) = &session.backend {
        said.message(SET_BACKEND_REQ_FD, &[], Some(backend.fd()))?;
    }
    let Device { table, region, queues, .. } = &session.device;
    for (info, file) in table.told() {
        said.message(ADD_MEM_REG, &[&[0; 8], info.as_bytes()].concat(), Some(file.as_fd()))?;
    }
    for info in session.device.gone() {
        #[cfg(test)]
        if moment::is_planted(moment::Bug::GoneUntold) {
            continue;
        }
        said.add(GONE, info.as_bytes(), std::iter::empty())?;
    }
    #[cfg(test)]
    let region = &region.as_ref().filter(|_| !moment::is_planted(moment::Bug::RegionUntold));
    if let Some(region) = region {
        let (InflightInfo { len, offset, queues, size }, file) = region.told();
        let payload = [len.as_bytes(), offset.as_bytes(), queues.as_bytes(), size.as_bytes()].concat();
        said.message(SET_INFLIGHT_FD, &payload, Some(file.as_fd()))?;
    }
    for (index, queue) in (0..).zip(queues) {
        said.queue(index, queue)?;
    }
    Ok(said.parcels)
}

struct Said {
    parcels: Vec<Parcel>,
}

impl Said {
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
        let size = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let header = Header { request, flags: 1, size };
        self.add(MESSAGE, &[header.as_bytes(), payload].concat(), fd.into_iter())
    }

    fn queue(&mut self, index: u32, queue: &Queue) -> Result<(), HandoverError> {
        let state = |num: u32| VringState { queue: index, num };
        if queue.size > 0 {
            self.message(SET_VRING_NUM, state(u32::from(queue.size)).as_bytes(), None)?;
        }
        let base = queue.goes_on_at();
        #[cfg(test)]
        let base = base.wrapping_add(if moment::is_planted(moment::Bug::BaseOfTaken) { queue.unanswered() } else { 0 });
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
        // One that is broken is not started again before the front-end does it.
        match queue.kick.as_ref().filter(|_| !queue.is_broken()) {
            Some(kick) => self.message(SET_VRING_KICK, number.as_bytes(), Some(kick.as_fd())),
            None => Ok(()),
        }
    }
}

/// A front-end that was told of, but for its kicks, which start its rings.
pub fn take(
    parcels: Vec<Parcel>,
    session: Session,
    log: &mut Log,
) -> Result<Option<(Client, Vec<Message>)>, HandoverError> {
    let mut parcels = parcels.into_iter();
    let Some(Parcel { bytes, descriptors }) = parcels.next() else { return Ok(None) };
    let mut descriptors = descriptors.into_iter();
    let (Some((&CONNECTION, partial)), Some(stream)) = (bytes.split_first(), descriptors.next()) else {
        return Err(not_understood());
    };
    let connection = Connection::resumed(stream.into(), partial, descriptors.collect());
    let connection = connection.map_err(|error| HandoverError::Failed("go on with a connection", error))?;
    let mut client = Client { connection, session };
    let mut kicks = Vec::new();
    for Parcel { bytes, descriptors } in parcels {
        match bytes.split_first() {
            Some((&GONE, info)) => {
                client.session.device.removed(RegionInfo::read_from_bytes(info).map_err(|_| not_understood())?);
            }
            Some((&MESSAGE, bytes)) => match message(bytes, descriptors)? {
                kick @ Message::SetVringKick(_) => kicks.push(kick),
                message => {
                    let refused = client.session.obey(message, &mut Unwatched, log);
                    refused.map_err(|refusal| HandoverError::Refused(with_causes(&refusal)))?;
                }
            },
            _ => return Err(not_understood()),
        }
    }
    Ok(Some((client, kicks)))
}

fn message(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Message, HandoverError> {
    let (header, payload) = Header::read_from_prefix(bytes).map_err(|_| not_understood())?;
    debug_assert_eq!(size_of_val(&header), HEADER_LEN);
    let message = Message::parse(Frame { header, payload: payload.to_vec(), fds });
    message.map_err(|why| HandoverError::Refused(why.to_string()))
}

fn not_understood() -> HandoverError {
    HandoverError::Refused("the process before this one hands over what is not understood here".into())
}

/// Before a server is started there is nothing to be watched with, and no message but a kick asks for it.
struct Unwatched;

impl Watch for Unwatched {
    fn watch(&mut self, _: std::os::fd::BorrowedFd<'_>, _: Interest, _: WatchKey) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    fn forget(&mut self, _: WatchKey) {}
}

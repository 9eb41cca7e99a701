//! The negotiated state of one front-end, and the effect of each of its messages on the device.
//!
//! It knows nothing about framing. Invariant: a refused message has changed nothing.
//!
//! Specification: QEMU, docs/interop/vhost-user.rst.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use disk::Geometry;
use disk::size::in_memory;

use crate::log::with_causes;
use crate::{Interest, Watch, WatchKey};

use super::KICK;
use super::backend::{Backend, Notified};
use super::config_space::{self, FLUSH, LOG_ALL, PROTOCOL_FEATURES, RING_EVENT_IDX};
use super::connection::DisconnectReason;
use super::device::Device;
use super::dirty_log::DirtyLog;
use super::event::{Event, Log};
use super::inflight::InflightRegion;
use super::message::{
    self, ConfigWindow, Frame, Header, InflightInfo, LogInfo, MAX_CONFIG, Message, Reply, VringAddr, VringFd,
    VringState,
};
use super::queue::Queue;
use super::refusal::Refusal;
use super::ring::{MAX_SIZE, is_reachable};
use super::signal::{signal_fd, vring_fd};
use super::table::{MAX_REGIONS, MemoryTable, RegionError};

const F_MQ: u64 = 1 << 0;
const F_LOG_SHMFD: u64 = 1 << 1;
const F_REPLY_ACK: u64 = 1 << 3;
const F_BACKEND_REQ: u64 = 1 << 5;
const F_CONFIG: u64 = 1 << 9;
const F_INFLIGHT_SHMFD: u64 = 1 << 12;
const F_RESET_DEVICE: u64 = 1 << 13;
const F_CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
const PROTOCOL: u64 = F_MQ
    | F_LOG_SHMFD
    | F_REPLY_ACK
    | F_BACKEND_REQ
    | F_CONFIG
    | F_INFLIGHT_SHMFD
    | F_RESET_DEVICE
    | F_CONFIGURE_MEM_SLOTS;

/// A reply to be sent to the front-end.
pub struct ReplyMessage {
    /// The encoded message.
    pub bytes: Vec<u8>,
    /// The file descriptor to be sent with it.
    pub fd: Option<OwnedFd>,
}

impl From<Vec<u8>> for ReplyMessage {
    fn from(bytes: Vec<u8>) -> ReplyMessage {
        ReplyMessage { bytes, fd: None }
    }
}

/// The result of executing a message.
pub enum Executed {
    /// Done; acknowledged if requested.
    Done,
    /// Done, with a reply of its own.
    Reply(Reply),
    /// Done, with a reply that includes a file.
    File(Reply, OwnedFd),
    /// To be continued when requests in flight have completed.
    Drain(Drain),
}

/// A message that waits for requests in flight.
#[derive(Clone, Copy)]
pub enum Drain {
    /// GET_VRING_BASE of one queue.
    Vring(u32),
    /// RESET_DEVICE.
    Reset,
}

/// The negotiated state of one front-end.
pub struct Session {
    /// The device used by the front-end.
    pub device: Device,
    offered: u64,
    /// The offered features that the front-end has accepted.
    pub features: u64,
    /// The offered protocol features that the front-end has accepted.
    pub protocol: u64,
    config: Vec<u8>,
    /// The channel for notifications of a changed configuration.
    pub backend: Option<Backend>,
    waiting: Option<(Header, Drain)>,
}

impl Session {
    /// A session before its first message.
    pub fn new(device: Device, geometry: &Geometry) -> Session {
        let queues = device.queue_count();
        Session {
            device,
            offered: config_space::features(geometry, queues),
            features: 0,
            protocol: 0,
            config: config_space::bytes(geometry, queues),
            backend: None,
            waiting: None,
        }
    }

    /// Handles a message; returns the reply, if there is one now.
    pub fn handle(
        &mut self,
        frame: Frame,
        watch: &mut dyn Watch,
        log: &mut Log,
    ) -> Result<Option<ReplyMessage>, DisconnectReason> {
        let header = frame.header;
        let message = Message::parse(frame).map_err(Refusal::Malformed);
        match message.and_then(|message| self.execute(message, watch, log)) {
            Ok(Executed::Reply(reply)) => Ok(Some(reply.encode(header.request).into())),
            Ok(Executed::File(reply, fd)) => {
                Ok(Some(ReplyMessage { bytes: reply.encode(header.request), fd: Some(fd) }))
            }
            Ok(Executed::Done) => Ok(self.acknowledge(&header, 0)),
            Ok(Executed::Drain(drain)) => {
                self.waiting = Some((header, drain));
                Ok(self.settle(watch, log))
            }
            Err(refusal) => {
                let why = with_causes(&refusal);
                // GET_* are answered with the requested value, which cannot express a refusal.
                match self.acknowledge(&header, 1).filter(|_| !message::has_own_reply(header.request)) {
                    Some(reply) => {
                        log.record(Event::Refused { why });
                        Ok(Some(reply))
                    }
                    None => Err(DisconnectReason::Refused(why)),
                }
            }
        }
    }

    fn acknowledge(&self, header: &Header, code: u64) -> Option<ReplyMessage> {
        let wanted = header.needs_reply() && self.protocol & F_REPLY_ACK != 0;
        wanted.then(|| Reply::Number(code).encode(header.request).into())
    }

    /// Returns true if a message waits for requests in flight; later messages wait for it.
    pub fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Returns true if the requests for which a message waits have completed.
    pub fn can_settle(&self) -> bool {
        match self.waiting {
            #[cfg(test)]
            _ if super::kill_point::test::is_planted(super::kill_point::Bug::WaitsForAll) && self.waiting.is_some() => {
                self.device.queues.iter().all(Queue::is_idle)
            }
            Some((_, Drain::Vring(index))) => find(&self.device.queues, index).is_none_or(Queue::is_idle),
            Some((_, Drain::Reset)) => self.device.queues.iter().all(Queue::is_idle),
            None => false,
        }
    }

    /// Completes the waiting message, if possible; returns its reply.
    pub fn settle(&mut self, watch: &mut dyn Watch, log: &mut Log) -> Option<ReplyMessage> {
        if !self.can_settle() {
            return None;
        }
        let (header, drain) = self.waiting.take()?;
        self.device.publish(log);
        match drain {
            Drain::Vring(index) => {
                let base = self.stop(index, watch);
                let state = VringState { queue: index, num: u32::from(base) };
                Some(Reply::Vring(state).encode(header.request).into())
            }
            Drain::Reset => {
                for index in 0..self.queue_count() {
                    self.stop(index, watch);
                    if let Some(queue) = find_mut(&mut self.device.queues, index) {
                        *queue = Queue::default();
                    }
                }
                // A reset ends all requests for the driver.
                if let Some(region) = &self.device.region {
                    region.clear_all();
                }
                self.update_log(log);
                self.acknowledge(&header, 0)
            }
        }
    }

    /// Sets a new disk size in the configuration space, and notifies the front-end if possible.
    pub fn resized(&mut self, geometry: &Geometry) -> Result<Notified, DisconnectReason> {
        let queues = self.device.queue_count();
        self.config = config_space::bytes(geometry, queues);
        let listens = self.protocol & F_BACKEND_REQ != 0 && self.protocol & F_CONFIG != 0;
        match self.backend.as_mut().filter(|_| listens) {
            Some(backend) => backend.configuration_changed().map(|()| Notified::Yes),
            None => Ok(Notified::Unsupported),
        }
    }

    /// Ends the session; returns the number of requests still to be completed.
    pub fn end(&mut self, watch: &mut dyn Watch) -> usize {
        for index in 0..self.queue_count() {
            self.stop(index, watch);
        }
        self.device.end()
    }

    /// Executes a message, or refuses it.
    pub fn execute(&mut self, message: Message, watch: &mut dyn Watch, log: &mut Log) -> Result<Executed, Refusal> {
        match message {
            Message::GetFeatures => Ok(Executed::Reply(Reply::Number(self.offered))),
            Message::GetProtocolFeatures => Ok(Executed::Reply(Reply::Number(PROTOCOL))),
            Message::GetQueueNum => Ok(Executed::Reply(Reply::Number(u64::from(self.queue_count())))),
            Message::GetMaxMemSlots => Ok(Executed::Reply(Reply::Number(MAX_REGIONS.into()))),
            Message::GetConfig(window) => Ok(Executed::Reply(Reply::Config(self.config(window)))),
            Message::GetVringBase(state) => self.get_base(state),
            Message::ResetDevice => Ok(self.reset()),
            Message::SetOwner => Ok(Executed::Done),
            Message::ResetOwner => Ok(self.disable_all()),
            Message::SetFeatures(bits) => self.set_features(bits, log).map(done),
            Message::SetProtocolFeatures(bits) => self.set_protocol(bits).map(done),
            // All of the configuration is read-only (CONFIG_WCE is not offered).
            Message::SetConfig => Err(Refusal::ReadOnlyConfig),
            Message::SetBackendReqFd(fd) => {
                self.backend = Some(Backend::new(fd).map_err(Refusal::Backend)?);
                Ok(Executed::Done)
            }
            Message::GetInflightFd(info) => self.create_region(&info),
            Message::SetInflightFd(info, fd) => self.set_region(&info, fd).map(done),
            Message::SetMemTable(regions) => {
                self.set_table(MemoryTable::of(regions), |device| device.region_added(None), log).map(done)
            }
            Message::AddMemReg(info, fd) => {
                let table = self.device.table.with(&info, fd);
                self.set_table(table, |device| device.region_added(Some(&info)), log).map(done)
            }
            Message::RemMemReg(info) => {
                let table = self.device.table.without(&info);
                self.set_table(table, |device| device.region_removed(info), log).map(done)
            }
            Message::SetLogBase(info, fd) => self.set_dirty_log(&info, fd, log),
            Message::SetLogFd(fd) => self.set_log_fd(fd).map(done),
            Message::SetVringNum(state) => self.set_size(state).map(done),
            Message::SetVringBase(state) => self.set_base(state).map(done),
            Message::SetVringAddr(place) => self.set_place(place, log).map(done),
            Message::SetVringEnable(state) => self.set_enabled(state).map(done),
            Message::SetVringKick(kick) => self.set_kick(kick, watch, log).map(done),
            Message::SetVringCall(VringFd { queue, fd }) => {
                let fd = fd.map(|fd| vring_fd(queue, fd)).transpose()?;
                self.queue(queue)?.set_call(fd);
                Ok(Executed::Done)
            }
            Message::SetVringErr(VringFd { queue, fd }) => {
                let fd = fd.map(|fd| vring_fd(queue, fd)).transpose()?;
                self.queue(queue)?.err = fd;
                Ok(Executed::Done)
            }
        }
    }

    fn queue_count(&self) -> u32 {
        self.device.queue_count().into()
    }

    fn queue(&mut self, index: u32) -> Result<&mut Queue, Refusal> {
        find_mut(&mut self.device.queues, index).ok_or(Refusal::NoQueue(index))
    }

    /// The bytes of a window, zero-padded; `None` if the window is invalid.
    fn config(&self, window: ConfigWindow) -> Option<(ConfigWindow, Vec<u8>)> {
        let end = window.offset.checked_add(window.size).filter(|&end| end <= MAX_CONFIG)?;
        let range = usize::try_from(window.offset).ok()?..usize::try_from(end).ok()?;
        Some((window, range.map(|at| self.config.get(at).copied().unwrap_or(0)).collect()))
    }

    fn set_features(&mut self, bits: u64, log: &mut Log) -> Result<(), Refusal> {
        let unknown = bits & !self.offered;
        if unknown != 0 {
            return Err(Refusal::Features(unknown));
        }
        self.features = bits;
        self.device.event_idx = bits & RING_EVENT_IDX != 0;
        self.device.can_flush = bits & FLUSH != 0;
        if bits & PROTOCOL_FEATURES == 0 {
            // Without this negotiation there is no SET_VRING_ENABLE: rings start enabled.
            for queue in &mut self.device.queues {
                queue.enabled = true;
            }
        }
        self.update_log(log);
        Ok(())
    }

    /// Uses the dirty log sent by the front-end while the feature is set; the front-end sets both while rings run. As
    /// long as there is no log, nothing is logged: a front-end that reconnects during a migration starts the rings
    /// first, and enables them when it has sent the log.
    fn update_log(&mut self, events: &mut Log) {
        let log = self.device.dirty_log.clone().filter(|_| self.features & LOG_ALL != 0);
        self.device.set_log(log, events);
    }

    /// The reply has the value zero, even if no acknowledgement was requested.
    fn set_dirty_log(&mut self, info: &LogInfo, fd: OwnedFd, events: &mut Log) -> Result<Executed, Refusal> {
        if self.protocol & F_LOG_SHMFD == 0 {
            return Err(Refusal::LogNotNegotiated);
        }
        self.device.dirty_log = Some(Arc::new(DirtyLog::of(info, fd).map_err(Refusal::Log)?));
        self.update_log(events);
        Ok(Executed::Reply(Reply::Number(0)))
    }

    fn set_log_fd(&mut self, fd: OwnedFd) -> Result<(), Refusal> {
        self.device.log_fd = Some(signal_fd(fd, Refusal::LogFd)?.ok_or(Refusal::LogFdNotSignal)?);
        Ok(())
    }

    fn set_protocol(&mut self, bits: u64) -> Result<(), Refusal> {
        let unknown = bits & !PROTOCOL;
        if unknown != 0 {
            return Err(Refusal::Features(unknown));
        }
        self.protocol = bits;
        Ok(())
    }

    /// Replaces the memory table. Requests in flight keep the memory that they were created with; rings are looked up
    /// again, and one that is no longer within the table waits for the next table.
    fn set_table(
        &mut self,
        table: Result<MemoryTable, RegionError>,
        record: impl FnOnce(&mut Device),
        log: &mut Log,
    ) -> Result<(), Refusal> {
        self.device.table = table.map_err(Refusal::Region)?;
        record(&mut self.device);
        for index in 0..self.device.queues.len() {
            self.device.start(index, log);
        }
        Ok(())
    }

    fn create_region(&mut self, requested: &InflightInfo) -> Result<Executed, Refusal> {
        let queues = self.region_queues()?;
        let (info, file) = InflightRegion::create(requested, queues).map_err(Refusal::Inflight)?;
        Ok(Executed::File(Reply::Inflight(info), file))
    }

    fn set_region(&mut self, info: &InflightInfo, file: OwnedFd) -> Result<(), Refusal> {
        let queues = self.region_queues()?;
        let running = (0..).zip(&self.device.queues).find(|(_, queue)| queue.is_recorded().is_some());
        if let Some((index, _)) = running {
            return Err(Refusal::Running(index));
        }
        self.device.region = Some(InflightRegion::of(info, file, queues).map_err(Refusal::Inflight)?);
        Ok(())
    }

    /// The maximum number of queues in a record; an error if records were not negotiated.
    fn region_queues(&self) -> Result<u16, Refusal> {
        if self.protocol & F_INFLIGHT_SHMFD == 0 {
            return Err(Refusal::NotNegotiated);
        }
        Ok(self.device.queue_count())
    }

    fn set_size(&mut self, VringState { queue: index, num }: VringState) -> Result<(), Refusal> {
        let queue = self.queue(index)?;
        let size = u16::try_from(num).ok().filter(|&size| size.is_power_of_two() && size <= MAX_SIZE);
        let size = size.ok_or(Refusal::Value { queue: index, what: "size", value: num })?;
        if queue.is_started() || !queue.is_idle() {
            return Err(Refusal::Running(index));
        }
        queue.size = size;
        Ok(())
    }

    fn set_base(&mut self, VringState { queue: index, num }: VringState) -> Result<(), Refusal> {
        let queue = self.queue(index)?;
        let base = u16::try_from(num).map_err(|_| Refusal::Value { queue: index, what: "base", value: num })?;
        if queue.is_started() {
            return Err(Refusal::Running(index));
        }
        queue.base = base;
        Ok(())
    }

    fn set_place(&mut self, place: VringAddr, log: &mut Log) -> Result<(), Refusal> {
        let index = place.queue;
        let Device { queues, table, .. } = &mut self.device;
        let queue = find_mut(queues, index).ok_or(Refusal::NoQueue(index))?;
        if queue.size > 0 && !is_reachable(table, &place, queue.size) {
            return Err(Refusal::Ring(index));
        }
        queue.place = Some(place);
        self.start(index, log);
        Ok(())
    }

    fn set_enabled(&mut self, VringState { queue: index, num }: VringState) -> Result<(), Refusal> {
        let queue = self.queue(index)?;
        match num {
            0 => queue.enabled = false,
            1 => queue.enabled = true,
            _ => return Err(Refusal::Value { queue: index, what: "enable", value: num }),
        }
        Ok(())
    }

    /// Starts a queue. In the specification it starts with the first kick; requests that the driver makes available
    /// earlier may be taken earlier, as every polling device does.
    fn set_kick(&mut self, kick: VringFd, watch: &mut dyn Watch, log: &mut Log) -> Result<(), Refusal> {
        let index = kick.queue;
        let Device { queues, table, .. } = &mut self.device;
        let queue = find_mut(queues, index).ok_or(Refusal::NoQueue(index))?;
        let fd = kick.fd.ok_or(Refusal::NoKick(index))?;
        if queue.place.is_some_and(|place| queue.size > 0 && !is_reachable(table, &place, queue.size)) {
            return Err(Refusal::Ring(index));
        }
        if queue.kick.is_some() {
            watch.forget(key(index));
        }
        if let Err(source) = watch.watch(fd.as_fd(), Interest::Read, key(index)) {
            queue.kick = None;
            return Err(Refusal::Fd { queue: index, source });
        }
        queue.kick = Some(fd);
        self.start(index, log);
        Ok(())
    }

    fn start(&mut self, index: u32, log: &mut Log) {
        self.device.start(in_memory(index.into()), log);
    }

    fn get_base(&mut self, VringState { queue: index, .. }: VringState) -> Result<Executed, Refusal> {
        self.queue(index)?.draining = true;
        Ok(Executed::Drain(Drain::Vring(index)))
    }

    fn reset(&mut self) -> Executed {
        for queue in &mut self.device.queues {
            queue.draining = true;
        }
        Executed::Drain(Drain::Reset)
    }

    /// RESET_OWNER: "recommended that back-ends either ignore this message, or use it to disable all rings".
    fn disable_all(&mut self) -> Executed {
        for queue in &mut self.device.queues {
            queue.enabled = false;
        }
        Executed::Done
    }

    fn stop(&mut self, index: u32, watch: &mut dyn Watch) -> u16 {
        let Some(queue) = find_mut(&mut self.device.queues, index) else { return 0 };
        if queue.is_started() {
            watch.forget(key(index));
        }
        queue.stop()
    }
}

fn done((): ()) -> Executed {
    Executed::Done
}

fn key(queue: u32) -> WatchKey {
    WatchKey(KICK + u64::from(queue))
}

fn find(queues: &[Queue], index: u32) -> Option<&Queue> {
    queues.get(usize::try_from(index).ok()?)
}

fn find_mut(queues: &mut [Queue], index: u32) -> Option<&mut Queue> {
    queues.get_mut(usize::try_from(index).ok()?)
}

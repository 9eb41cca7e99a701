//! A device: requests pass its controller, its channels and its link.
//!
//! Everything is served in the order in which it comes, so that the time at which a transfer ends is known when it
//! begins. Invariant: nothing ends before it began, and no channel does two things at one time.

use std::collections::VecDeque;

/// The parameters of a modelled device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Parts that work at the same time: flash dies, spindles.
    pub channels: usize,
    /// Consecutive bytes that are on one channel.
    pub stripe: u64,
    /// Channels that work for one request at the same time, at most.
    pub width: usize,
    /// Nanoseconds from a request to its first byte, in which others may be served.
    pub latency: u64,
    /// Nanoseconds of the controller for each request, in which no other has its attention.
    pub command: u64,
    /// Nanoseconds of a channel for each stripe of a request, or part of one.
    pub access: u64,
    /// Nanoseconds of a channel that was elsewhere.
    pub seek: u64,
    /// Bytes a second of a channel.
    pub channel_rate: u64,
    /// Bytes a second of the link.
    pub link_rate: u64,
    /// Nanoseconds of a sync.
    pub sync: u64,
}

/// A device at work.
#[derive(Clone, Debug)]
pub struct Device {
    spec: Spec,
    /// When each of these is free.
    controller: u64,
    link: u64,
    channels: Vec<Channel>,
    /// When the last stripes of a request end. Scratch.
    recent: VecDeque<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Channel {
    free: u64,
    /// The offset at which the next transfer needs no seek.
    head: u64,
}

impl Device {
    /// An idle device.
    ///
    /// # Panics
    /// If the description is of no device: without channels, or with a rate of nothing.
    pub fn new(spec: Spec) -> Device {
        assert!(spec.channels > 0 && spec.width > 0 && spec.stripe > 0, "no device: {spec:?}");
        assert!(spec.channel_rate > 0 && spec.link_rate > 0, "a device that moves nothing: {spec:?}");
        let channels = vec![Channel::default(); spec.channels];
        Device { spec, controller: 0, link: 0, channels, recent: VecDeque::with_capacity(spec.width) }
    }

    /// When a transfer of `len` bytes at `at` ends that begins `now`.
    pub fn transfer(&mut self, now: u64, at: u64, len: u64) -> u64 {
        let begun = self.command(now) + self.spec.latency;
        self.recent.clear();
        let (mut from, end, mut done) = (at, at.saturating_add(len), begun);
        while from < end {
            let stripe = from / self.spec.stripe;
            let len = (end - from).min(self.spec.stripe - from % self.spec.stripe);
            // Limits the stripes of one request at one time.
            let after = match self.recent.len() == self.spec.width {
                true => self.recent.pop_front().unwrap_or(begun),
                false => begun,
            };
            let ended = self.on_channel(stripe, after, from, len);
            self.recent.push_back(ended);
            done = done.max(ended);
            from += len;
        }
        self.link = self.link.max(now) + nanoseconds(len, self.spec.link_rate);
        done.max(self.link)
    }

    /// When a sync ends that begins `now`.
    pub fn sync(&mut self, now: u64) -> u64 {
        self.command(now) + self.spec.sync
    }

    /// When something ends that moves no data and begins `now`: a deallocation.
    pub fn note(&mut self, now: u64) -> u64 {
        self.command(now) + self.spec.latency
    }

    fn command(&mut self, now: u64) -> u64 {
        self.controller = self.controller.max(now) + self.spec.command;
        self.controller
    }

    fn on_channel(&mut self, stripe: u64, after: u64, at: u64, len: u64) -> u64 {
        let count = self.channels.len() as u64;
        let channel = usize::try_from(stripe % count).ok().and_then(|number| self.channels.get_mut(number));
        let Some(channel) = channel else { unreachable!("a number below that of the channels") };
        // The next stripe of a channel follows the last one on it.
        let place = (stripe / count) * self.spec.stripe + at % self.spec.stripe;
        let seek = if channel.head == place { 0 } else { self.spec.seek };
        channel.free = channel.free.max(after) + seek + self.spec.access + nanoseconds(len, self.spec.channel_rate);
        channel.head = place + len;
        channel.free
    }
}

/// Time that a number of bytes takes at a rate in bytes per second.
fn nanoseconds(bytes: u64, rate: u64) -> u64 {
    let took = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
    u64::try_from(took).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod test {
    use super::*;

    const SPEC: Spec = Spec {
        channels: 2,
        stripe: 1000,
        width: 1,
        latency: 100,
        command: 10,
        access: 5,
        seek: 50,
        channel_rate: 1_000_000_000,
        link_rate: 2_000_000_000,
        sync: 7,
    };

    #[test]
    fn a_transfer_pays_for_command_latency_seek_access_and_bytes() {
        let mut device = Device::new(SPEC);
        assert_eq!(device.transfer(0, 0, 100), 10 + 100 + 5 + 100, "the head is there already");
        assert_eq!(device.transfer(1000, 100, 100), 1000 + 10 + 100 + 5 + 100, "and here");
        assert_eq!(device.transfer(2000, 0, 100), 2000 + 10 + 100 + 50 + 5 + 100);
        assert_eq!(device.sync(3000), 3017);
    }

    #[test]
    fn a_request_is_served_by_so_many_channels_at_once_as_its_width() {
        let whole = |width| Device::new(Spec { width, seek: 0, ..SPEC }).transfer(0, 0, 2000);
        assert_eq!((whole(1), whole(2)), (110 + 2 * 1005, 110 + 1005));
        let mut apart = Device::new(Spec { seek: 0, ..SPEC });
        let ends = [apart.transfer(0, 0, 1000), apart.transfer(0, 1000, 1000)];
        assert_eq!(ends, [110 + 1005, 120 + 1005], "two requests are served by two channels");
    }

    #[test]
    fn the_link_bounds_what_all_channels_move() {
        let mut device = Device::new(Spec { channels: 64, stripe: 1000, width: 64, seek: 0, ..SPEC });
        assert_eq!(device.transfer(0, 0, 64_000), 32_000);
    }

    #[test]
    fn consecutive_stripes_of_a_channel_need_no_seek() {
        let mut device = Device::new(SPEC);
        device.transfer(0, 0, 1000);
        let begun = 10_000;
        assert_eq!(device.transfer(begun, 2000, 1000), begun + 110 + 5 + 1000);
        assert_eq!(device.transfer(2 * begun, 6000, 1000), 2 * begun + 110 + 50 + 5 + 1000);
    }
}

//! Metrics of the layers around the disks: guest kernels and host devices.
//!
//! A host device is one series, however many disks are on it: its figures must not be added up by disk. The mapping
//! from disks to devices is a separate series. Unknown values have no series.

use std::collections::BTreeMap;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;
use stats::{Completed, DeviceCounts, float};

use super::{Disk, Found, Labels, Written, of, plus};

/// Kinds of requests that a kernel counts, in the order of [`DeviceCounts::all`].
const KINDS: [&str; 4] = ["read", "write", "discard", "flush"];

/// Devices and their counters, with the labels of each.
type Devices = Vec<(Labels, DeviceCounts)>;

impl Found {
    /// Writes the metrics of both layers.
    pub(super) fn encode_layers(&self, encoder: &mut DescriptorEncoder<'_>) -> Written {
        let guest = |disk: &Disk| Some(disk.read.layers.as_ref()?.guest.as_ref().ok()?.line.counts);
        let known = self.by_disk(move |disk| f64::from(u8::from(guest(disk).is_some())));
        of("guest_known", "Whether the guest of a disk says what its kernel counts", None).gauges(encoder, known)?;
        let guests = self.disks.iter().filter_map(|disk| Some((disk.labels.clone(), guest(disk)?))).collect();
        encode_devices(encoder, "guest", "as the guest counts it", &guests)?;
        let mut devices = BTreeMap::new();
        let mut on = Vec::new();
        for disk in &self.disks {
            let beneath = disk.read.layers.as_ref().and_then(|layers| layers.host.as_ref().ok());
            for (depth, device) in beneath.into_iter().flatten().enumerate() {
                devices.insert(device.line.name.clone(), device.line.counts);
                if depth == 0 {
                    on.push((disk.with(&[("device", &device.line.name)]), 1.0));
                }
            }
        }
        of("disk_host_device", "On which device of the host a disk's image is", None)
            .gauges(encoder, on.into_iter())?;
        let hosts = devices.into_iter().map(|(name, counts)| (vec![("device", name)], counts)).collect();
        encode_devices(encoder, "host_device", "of a device of the host that images are on", &hosts)
    }
}

/// The kernel's counters of devices; `what` is the prefix of the metrics' names, and `whose` the end of their help
/// texts.
fn encode_devices(encoder: &mut DescriptorEncoder<'_>, what: &str, whose: &str, devices: &Devices) -> Written {
    let kinds = |value: fn(Completed) -> f64| {
        devices.iter().flat_map(move |(labels, counts)| {
            let kinds = KINDS.into_iter().zip(counts.all());
            kinds.map(move |(kind, completed)| (plus(labels, "operation", kind), value(completed)))
        })
    };
    let each =
        |value: fn(&DeviceCounts) -> f64| devices.iter().map(move |(labels, counts)| (labels.clone(), value(counts)));
    of(&format!("{what}_operations"), &format!("Requests that were completed, {whose}"), None)
        .counters(encoder, kinds(|completed| float(completed.count)))?;
    of(&format!("{what}_transferred"), &format!("Bytes of requests, {whose}"), Some(Unit::Bytes))
        .counters(encoder, kinds(|completed| float(completed.bytes)))?;
    of(&format!("{what}_operation_time"), &format!("Durations of requests, {whose}"), Some(Unit::Seconds))
        .counters(encoder, kinds(|completed| float(completed.ms) / 1e3))?;
    let help = format!("Durations of all requests; the rate is the average queue size, {whose}");
    of(&format!("{what}_queue_time"), &help, Some(Unit::Seconds))
        .counters(encoder, each(|counts| float(counts.weighted_ms) / 1e3))?;
    of(&format!("{what}_inflight"), &format!("Requests in flight, {whose}"), None)
        .gauges(encoder, each(|counts| float(counts.in_flight)))
}

//! Metrics in the text format of OpenMetrics, for Prometheus and compatible scrapers.
//!
//! Everything is read on request, and nothing is kept. Names have base units. The number of series is bounded: labels
//! are plugged disks, repositories, and words of closed lists.

mod layers;

use std::collections::HashMap;

use api::{Health, Name, Problem, Space, Sr, VbdState, Vdi};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit};
use stats::{Count, Histogram, Kind, Outcome, Stage, float};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::statistics::{self, DiskFilter, Read};
use crate::task::blocking;

/// The content type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The upper bounds of the latency buckets, in microseconds.
const BOUNDS: [u64; 22] = [
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    30_000_000,
    120_000_000,
];

/// Kinds of requests with latency histograms; the others are rare.
const TIMED: [Kind; 3] = [Kind::Read, Kind::Write, Kind::Flush];

type Labels = Vec<(&'static str, String)>;
type Written = Result<(), std::fmt::Error>;

/// All exported data, as read for one request.
#[derive(Debug)]
struct Found {
    disks: Vec<Disk>,
    repositories: Vec<(Labels, Space)>,
    vbds: Vec<(VbdState, u64)>,
    open_tasks: u64,
    failed_schedules: u64,
    /// The labels of each repository, VBD and VDI.
    health: Vec<Labels>,
    host: Labels,
}

#[derive(Debug)]
struct Disk {
    labels: Labels,
    read: Read,
    latencies: HashMap<Kind, Histogram>,
}

/// All metrics as text.
pub async fn text(daemon: &Daemon) -> Result<String, Problem> {
    let disks = statistics::read(daemon, DiskFilter { layers: true, ..DiskFilter::default() }, Disk::of).await?;
    let known = daemon.catalogue.read_for_client(|view| {
        let vdis = view.scheduled_vdis()?.into_iter().map(|vdi| vdi.retention_problem);
        let vms = view.scheduled_vms()?.into_iter().map(|vm| vm.retention_problem);
        let backups = view.vdis_to_back_up()?.into_iter().map(|vdi| vdi.backup_problem);
        let backups = backups.chain(view.vms_to_back_up()?.into_iter().map(|vm| vm.backup_problem));
        let failed = vdis.chain(vms).chain(backups).flatten().count();
        let srs = view.shown_srs()?;
        let health = health(view, &srs)?;
        Ok((srs, view.count_vbds()?, view.tasks(true)?.len(), failed, health))
    });
    let (srs, vbds, tasks, failed, health) = known.await?;
    let named = |name: String, uuid: uuid::Uuid| vec![("sr", name), ("sr_uuid", uuid.to_string())];
    let repositories =
        srs.into_iter().filter_map(|sr| Some((named(sr.name.to_string(), sr.uuid), sr.space?))).collect();
    let host = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    let open_tasks = tasks as u64;
    let failed_schedules = failed as u64;
    let found = Found { disks, repositories, vbds, open_tasks, failed_schedules, health, host };
    blocking("write metrics", move || {
        let mut registry = Registry::with_prefix("tapline");
        registry.register_collector(Box::new(found));
        let mut text = String::new();
        encode(&mut text, &registry).map_err(|error| Problem::failed("write metrics", error))?;
        Ok(text)
    })
    .await
}

/// The labels of the health of each object.
fn health(view: &repo::View<'_>, srs: &[Sr]) -> Result<Vec<Labels>, Problem> {
    let labels = |kind: &str, uuid: Uuid, name: &Name, health: &Health| {
        let (name, state) = (name.to_string(), health.state.name().to_owned());
        vec![("kind", kind.to_owned()), ("uuid", uuid.to_string()), ("name", name), ("state", state)]
    };
    let vdis: HashMap<Uuid, Vdi> = view.vdis(None)?.into_iter().map(|vdi| (vdi.uuid, vdi)).collect();
    let mut all: Vec<Labels> = srs.iter().map(|sr| labels("sr", sr.uuid, &sr.name, &sr.health)).collect();
    for vbd in view.vbds(None, None)? {
        let Some(vdi) = vdis.get(&vbd.vdi) else { continue };
        all.push(labels("vbd", vbd.uuid, &vdi.name, &vbd.health));
    }
    all.extend(vdis.values().map(|vdi| labels("vdi", vdi.uuid, &vdi.name, &vdi.health)));
    Ok(all)
}

impl Disk {
    fn of(read: Read) -> Disk {
        let (disk, text) = (&read.disk, |text: &dyn ToString| text.to_string());
        let vm = disk.vm_name.as_ref().map_or_else(String::new, ToString::to_string);
        let labels = vec![
            ("vbd", text(&disk.vbd.uuid)),
            ("vm", vm),
            ("position", text(&disk.vbd.position)),
            ("vdi", text(&disk.vdi_name)),
            ("sr", text(&disk.sr_name)),
        ];
        let latencies = TIMED.into_iter().map(|kind| (kind, read.reader.histogram(kind, None).unwrap_or_default()));
        Disk { labels, latencies: latencies.collect(), read }
    }

    fn with(&self, more: &[(&'static str, &str)]) -> Labels {
        let more = more.iter().map(|(name, value)| (*name, (*value).to_owned()));
        self.labels.iter().cloned().chain(more).collect()
    }
}

/// A metric with several series.
struct Family<'a> {
    name: &'a str,
    help: &'a str,
    unit: Option<Unit>,
}

impl Family<'_> {
    fn counters(&self, encoder: &mut DescriptorEncoder<'_>, all: impl Iterator<Item = (Labels, f64)>) -> Written {
        let mut metric = encoder.encode_descriptor(self.name, self.help, self.unit.as_ref(), MetricType::Counter)?;
        for (labels, value) in all {
            metric.encode_family(&labels)?.encode_counter(&value, None::<&Exemplar<NoLabelSet, f64>>)?;
        }
        Ok(())
    }

    fn gauges(&self, encoder: &mut DescriptorEncoder<'_>, all: impl Iterator<Item = (Labels, f64)>) -> Written {
        let mut metric = encoder.encode_descriptor(self.name, self.help, self.unit.as_ref(), MetricType::Gauge)?;
        for (labels, value) in all {
            metric.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }
}

fn of<'a>(name: &'a str, help: &'a str, unit: Option<Unit>) -> Family<'a> {
    Family { name, help, unit }
}

impl Collector for Found {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Written {
        self.encode_operations(&mut encoder)?;
        self.encode_latencies(&mut encoder)?;
        self.encode_processes(&mut encoder)?;
        self.encode_layers(&mut encoder)?;
        self.encode_host(&mut encoder)
    }
}

impl Found {
    /// One series for each disk and kind of request.
    fn by_kind<'a>(&'a self, value: impl Fn(&Disk, Kind) -> f64 + 'a) -> impl Iterator<Item = (Labels, f64)> + 'a {
        self.disks
            .iter()
            .flat_map(move |disk| Kind::ALL.map(|kind| (disk.with(&[("operation", kind.name())]), value(disk, kind))))
    }

    fn by_disk<'a>(&'a self, value: impl Fn(&Disk) -> f64 + 'a) -> impl Iterator<Item = (Labels, f64)> + 'a {
        self.disks.iter().map(move |disk| (disk.labels.clone(), value(disk)))
    }

    fn encode_operations(&self, encoder: &mut DescriptorEncoder<'_>) -> Written {
        let counts = |disk: &Disk, kind| disk.read.snapshot.kind(kind);
        of("disk_operations", "Requests that were answered", None)
            .counters(encoder, self.by_kind(|disk, kind| float(counts(disk, kind).count())))?;
        of("disk_transferred", "Bytes of requests that were answered", Some(Unit::Bytes))
            .counters(encoder, self.by_kind(|disk, kind| float(counts(disk, kind).bytes())))?;
        of("disk_split_operations", "Requests that took several operations of the storage in turn", None)
            .counters(encoder, self.by_kind(|disk, kind| float(counts(disk, kind).splits())))?;
        let errors = self.disks.iter().flat_map(|disk| {
            Kind::ALL.into_iter().flat_map(move |kind| {
                Outcome::ERRORS.map(|error| {
                    let labels = disk.with(&[("operation", kind.name()), ("error", error.name())]);
                    (labels, float(counts(disk, kind).errors(error)))
                })
            })
        });
        of("disk_errors", "Requests that failed", None).counters(encoder, errors)?;
        let stages = self.disks.iter().flat_map(|disk| {
            Kind::ALL.into_iter().flat_map(move |kind| {
                Stage::ALL.map(|stage| {
                    let labels = disk.with(&[("operation", kind.name()), ("stage", stage.name())]);
                    (labels, seconds(counts(disk, kind).sum(stage)))
                })
            })
        });
        let help = "Time that requests spent in a stage; its rate is the average number of requests in it";
        of("disk_operation_time", help, Some(Unit::Seconds)).counters(encoder, stages)?;
        let count = |disk: &Disk, count| disk.read.snapshot.count(count);
        of("disk_throttled_requests", "Requests that a limit of the disk has held back", None)
            .counters(encoder, self.by_disk(move |disk| float(count(disk, Count::Throttled))))?;
        of("disk_throttled_time", "For how long it has, in all", Some(Unit::Seconds))
            .counters(encoder, self.by_disk(move |disk| seconds(count(disk, Count::ThrottledNs))))?;
        of("disk_split_transfers", "Transfers that were split on their way to the storage", None)
            .counters(encoder, self.by_disk(move |disk| float(count(disk, Count::Splits))))?;
        of("disk_merged_transfers", "Transfers that were merged into another one", None)
            .counters(encoder, self.by_disk(move |disk| float(count(disk, Count::Merges))))?;
        of("disk_shared_requests", "Requests that have waited for the disk's share of its storage", None)
            .counters(encoder, self.by_disk(move |disk| float(count(disk, Count::Shared))))?;
        of("disk_shared_time", "For how long they have, in all", Some(Unit::Seconds))
            .counters(encoder, self.by_disk(move |disk| seconds(count(disk, Count::SharedNs))))
    }

    fn encode_latencies(&self, encoder: &mut DescriptorEncoder<'_>) -> Written {
        let help = "How long requests took";
        let mut metric =
            encoder.encode_descriptor("disk_latency", help, Some(&Unit::Seconds), MetricType::Histogram)?;
        for disk in &self.disks {
            for (kind, histogram) in TIMED.iter().filter_map(|kind| Some((kind, disk.latencies.get(kind)?))) {
                let sum = seconds(disk.read.snapshot.kind(*kind).sum_of_all());
                let labels = disk.with(&[("operation", kind.name())]);
                let no_exemplars = None::<&HashMap<usize, Exemplar<NoLabelSet, f64>>>;
                metric.encode_family(&labels)?.encode_histogram(
                    sum,
                    histogram.count(),
                    &buckets(histogram),
                    no_exemplars,
                )?;
            }
        }
        Ok(())
    }

    fn encode_processes(&self, encoder: &mut DescriptorEncoder<'_>) -> Written {
        of("disk_inflight", "Requests in flight", None)
            .gauges(encoder, self.by_kind(|disk, kind| float(disk.read.snapshot.in_flight(kind))))?;
        let help = "How long the oldest request has been in flight; zero if there is none";
        of("disk_oldest_inflight", help, Some(Unit::Seconds))
            .gauges(encoder, self.by_kind(|disk, kind| disk.read.snapshot.oldest(kind).map_or(0.0, seconds)))?;
        let count = |count| move |disk: &Disk| float(disk.read.snapshot.count(count));
        of("disk_wakeups", "How often the process of a disk slept and was woken up", None)
            .counters(encoder, self.by_disk(count(Count::Sleeps)))?;
        let polls = self.disks.iter().flat_map(|disk| {
            [("hit", Count::PollsHit), ("miss", Count::PollsMissed)]
                .map(|(result, count)| (disk.with(&[("result", result)]), float(disk.read.snapshot.count(count))))
        });
        of("disk_polls", "Looks for more work before sleeping", None).counters(encoder, polls)?;
        let polled = |disk: &Disk| seconds(disk.read.snapshot.count(Count::PolledTime));
        of("disk_polled_time", "For how long the process of a disk has looked for more work", Some(Unit::Seconds))
            .counters(encoder, self.by_disk(polled))?;
        of("disk_processes", "Processes that have served a disk since it was plugged", None)
            .counters(encoder, self.by_disk(|disk| float(disk.read.snapshot.incarnation)))
    }

    fn encode_host(&self, encoder: &mut DescriptorEncoder<'_>) -> Written {
        let space = self.repositories.iter().flat_map(|(labels, space)| {
            let states = [
                ("size", space.physical_size),
                ("used", space.physical_utilisation),
                ("free", space.free),
                ("images", space.images),
                ("virtual", space.virtual_allocation),
            ];
            states.map(|(state, bytes)| (plus(labels, "state", state), float(bytes)))
        });
        of("sr_space", "Space of a repository", Some(Unit::Bytes)).gauges(encoder, space)?;
        let full = self.repositories.iter().map(|(labels, space)| (labels.clone(), f64::from(u8::from(space.full))));
        of("sr_full", "Whether guests wait for space", None).gauges(encoder, full)?;
        let help = "1: the health of a repository, VBD or VDI";
        of("health", help, None).gauges(encoder, self.health.iter().map(|labels| (labels.clone(), 1.0)))?;
        let vbds = self.vbds.iter().map(|(state, count)| {
            let word = serde_json::to_value(state).ok();
            let word = word.as_ref().and_then(serde_json::Value::as_str).unwrap_or("unknown");
            (vec![("state", word.to_owned())], float(*count))
        });
        of("vbds", "VBDs by state", None).gauges(encoder, vbds)?;
        of("open_tasks", "Tasks that have not ended", None)
            .gauges(encoder, std::iter::once((Vec::new(), float(self.open_tasks))))?;
        let help = "Schedules of VDIs and VMs that did not make the snapshot or backup that was due last";
        of("failed_schedules", help, None)
            .gauges(encoder, std::iter::once((Vec::new(), float(self.failed_schedules))))?;
        let mut build = encoder.encode_descriptor("build", "The daemon", None, MetricType::Info)?;
        build.encode_info(&self.host)
    }
}

fn plus(labels: &Labels, name: &'static str, value: &str) -> Labels {
    labels.iter().cloned().chain([(name, value.to_owned())]).collect()
}

/// The number of durations below each bound and above the previous one. The last bucket has the rest.
fn buckets(histogram: &Histogram) -> Vec<(f64, u64)> {
    let mut buckets: Vec<(f64, u64)> = BOUNDS.iter().map(|us| (seconds(us * 1000), 0)).collect();
    buckets.push((f64::MAX, 0));
    for (bucket, count) in histogram.buckets() {
        // The middle of the fine bucket: within a thousandth of its durations.
        let (from, to) = stats::bucket_bounds(*bucket);
        let ns = from + (to - from) / 2;
        let place = BOUNDS.iter().position(|us| ns <= us * 1000).unwrap_or(BOUNDS.len());
        if let Some((_, sum)) = buckets.get_mut(place) {
            *sum = sum.saturating_add(*count);
        }
    }
    buckets
}

/// A duration in seconds.
fn seconds(ns: u64) -> f64 {
    float(ns) / 1e9
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn each_duration_is_in_the_bucket_of_its_bound() {
        let fine = Histogram::of([(100, 1), (5000, 2), (stats::BUCKETS - 1, 3)]);
        let counted = buckets(&fine);
        assert_eq!(counted.iter().map(|(_, count)| count).sum::<u64>(), 6);
        assert_eq!((counted[0], counted[BOUNDS.len()].1), ((5e-6, 1), 3));
        let ns = stats::bucket_bounds(5000).0;
        let place = counted.iter().position(|(_, count)| *count == 2).unwrap();
        assert!(counted[place].0 * 1e9 >= ns as f64 && counted[place - 1].0 * 1e9 < ns as f64);
    }
}

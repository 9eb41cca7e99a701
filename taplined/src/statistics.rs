//! Reads the statistics pages of plugged disks.
//!
//! Disk processes are not involved, so stuck ones are seen as well. They are not trusted either: a page contains only
//! numbers ([`stats::Reader`]). Nothing is kept between two readings; an idle daemon reads nothing.

pub mod layers;

use std::collections::HashMap;

use api::{
    Code, DiskStatistics, LatencyBucket, Name, Operation, OperationStatistics, Problem, RequestInFlight, StageInFlight,
    StageTimes, Vbd, VbdState,
};
use jiff::Timestamp;
use repo::View;
use stats::{Histogram, InFlight, Kind, Reader, Snapshot, Stage};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::disk::paths::DiskPaths;
use crate::task::blocking;
use layers::{Around, Layers};

/// Maximum number of requests in flight listed for a disk.
const LISTED: usize = 64;

/// Number of fine buckets merged into one: sixteen remain per doubling.
const COARSE: usize = 32;

/// A choice of disks that meet all given criteria.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskFilter {
    /// Only this one.
    pub vbd: Option<Uuid>,
    /// Only those of this VM.
    pub vm: Option<Uuid>,
    /// Only those of VDIs in this repository.
    pub sr: Option<Uuid>,
    /// Also query guests, and read the host's devices.
    pub layers: bool,
}

/// A plugged VBD, and its surroundings in the catalogue.
#[derive(Clone, Debug)]
pub struct Plugged {
    pub vbd: Vbd,
    pub vm_name: Option<Name>,
    pub vdi_name: Name,
    pub sr: Uuid,
    pub sr_name: Name,
}

/// A statistics page that was read.
#[derive(Debug)]
pub struct Read {
    pub disk: Plugged,
    pub snapshot: Snapshot,
    /// The reader, for its histograms.
    pub reader: Reader,
    /// The layers above and beneath, if requested.
    pub layers: Option<Layers>,
}

/// Applies `then` to the pages of the selected disks, on a blocking thread. A disk whose process has not yet created
/// a page, or is of a version without pages, is left out.
pub async fn read<T: Send + 'static>(
    daemon: &Daemon,
    which: DiskFilter,
    then: impl Fn(Read) -> T + Send + 'static,
) -> Result<Vec<T>, Problem> {
    let plugged = daemon.catalogue.read_for_client(move |view| plugged(view, which)).await?;
    let around = if which.layers { Some(Around::of(daemon, &plugged).await?) } else { None };
    let config = daemon.config.clone();
    blocking("read statistics pages", move || {
        let around = around.map(Around::read);
        let read = |disk: Plugged| {
            let layers = around.as_ref().map(|around| around.layers(&disk));
            let page = DiskPaths::of(&config, disk.vbd.uuid).page();
            let opened = Reader::open(&page).and_then(|reader| Ok((reader.snapshot()?, reader)));
            match opened {
                Ok((snapshot, reader)) => Some(then(Read { disk, snapshot, reader, layers })),
                Err(error) => {
                    tracing::debug!(vbd = %disk.vbd.uuid, "its statistics page {}: {error}", page.display());
                    None
                }
            }
        };
        Ok(plugged.into_iter().filter_map(read).collect())
    })
    .await
}

/// The selected plugged VBDs, with their surroundings.
fn plugged(view: &View<'_>, which: DiskFilter) -> Result<Vec<Plugged>, Problem> {
    let mut vbds = match which.vbd {
        Some(vbd) => vec![view.vbd(vbd)?],
        None => view.vbds(which.vm, None)?,
    };
    vbds.retain(is_served);
    let srs: HashMap<Uuid, Name> = view.srs()?.into_iter().map(|sr| (sr.uuid, sr.name)).collect();
    let vms: HashMap<Uuid, Name> = view.vms()?.into_iter().map(|vm| (vm.uuid, vm.name)).collect();
    let mut plugged = Vec::with_capacity(vbds.len());
    for vbd in vbds {
        let vdi = view.vdi(vbd.vdi)?;
        let Some(sr_name) = srs.get(&vdi.sr).cloned() else { continue };
        if which.sr.is_none_or(|sr| sr == vdi.sr) {
            let vm_name = vbd.vm.and_then(|vm| vms.get(&vm).cloned());
            plugged.push(Plugged { vbd, vm_name, vdi_name: vdi.name, sr: vdi.sr, sr_name });
        }
    }
    Ok(plugged)
}

fn is_served(vbd: &Vbd) -> bool {
    matches!(vbd.state, VbdState::Plugged | VbdState::Restarting | VbdState::Unplugging)
}

/// The problem of a VBD without a page.
pub fn none_of(vbd: Uuid) -> Problem {
    Problem::new(Code::State, format!("VBD {vbd} has no statistics: it is not plugged, or its process has no page"))
        .advise("plug it, or plug it again")
}

impl Read {
    /// The statistics as the API shows them.
    pub fn shown(&self, histograms: bool) -> DiskStatistics {
        let Read { disk, snapshot, layers, .. } = self;
        let count = |count| snapshot.count(count);
        DiskStatistics {
            vbd: disk.vbd.uuid,
            vm: disk.vbd.vm,
            vm_name: disk.vm_name.clone(),
            position: disk.vbd.position,
            vdi: disk.vbd.vdi,
            vdi_name: disk.vdi_name.clone(),
            sr: disk.sr,
            sr_name: disk.sr_name.clone(),
            at: Timestamp::now(),
            clock_ns: snapshot.read,
            pid: snapshot.pid,
            processes: snapshot.incarnation,
            in_flight: snapshot.in_flight.len() as u64,
            oldest_ns: snapshot.oldest_of_all(),
            sleeps: count(stats::Count::Sleeps),
            polls_hit: count(stats::Count::PollsHit),
            polls_missed: count(stats::Count::PollsMissed),
            throttled: count(stats::Count::Throttled),
            throttled_ns: count(stats::Count::ThrottledNs),
            shared: count(stats::Count::Shared),
            shared_ns: count(stats::Count::SharedNs),
            operations: Kind::ALL.iter().map(|kind| self.operation(*kind, histograms)).collect(),
            requests: snapshot.in_flight.iter().take(LISTED).map(|request| in_flight(request, snapshot.read)).collect(),
            guest: layers.as_ref().map(Layers::guest_shown),
            host: layers.as_ref().map(Layers::host_shown),
        }
    }

    fn operation(&self, kind: Kind, histograms: bool) -> OperationStatistics {
        let (counts, snapshot) = (self.snapshot.kind(kind), &self.snapshot);
        let latencies = |stage| histograms.then(|| coarse(&self.reader.histogram(kind, stage).unwrap_or_default()));
        OperationStatistics {
            operation: operation_of(kind),
            count: counts.count(),
            size: counts.bytes(),
            errors: counts.all_errors(),
            split: counts.splits(),
            longest_ns: counts.longest(),
            in_flight: snapshot.in_flight(kind),
            oldest_ns: snapshot.oldest(kind),
            stages: StageTimes {
                ring: counts.sum(Stage::Ring),
                map: counts.sum(Stage::Map),
                split: counts.sum(Stage::Split),
                queue: counts.sum(Stage::Queue),
                storage: counts.sum(Stage::Storage),
                completion: counts.sum(Stage::Completion),
                notify: counts.sum(Stage::Notify),
            },
            latencies: latencies(None),
            storage_latencies: latencies(Some(Stage::Storage)),
        }
    }
}

fn operation_of(kind: Kind) -> Operation {
    match kind {
        Kind::Read => Operation::Read,
        Kind::Write => Operation::Write,
        Kind::Flush => Operation::Flush,
        Kind::Discard => Operation::Discard,
        Kind::WriteZeroes => Operation::WriteZeroes,
    }
}

fn in_flight(request: &InFlight, now: u64) -> RequestInFlight {
    RequestInFlight {
        operation: operation_of(request.kind),
        offset: request.at,
        size: request.len,
        age_ns: now.saturating_sub(request.taken),
        stage: if request.stage() == Stage::Storage { StageInFlight::Storage } else { StageInFlight::Map },
    }
}

/// Merges fine buckets into buckets of a sixteenth of a doubling.
fn coarse(histogram: &Histogram) -> Vec<LatencyBucket> {
    let mut buckets: Vec<LatencyBucket> = Vec::new();
    for (bucket, count) in histogram.buckets() {
        let below_ns = stats::bucket_bounds(bucket / COARSE * COARSE + COARSE - 1).1;
        match buckets.last_mut() {
            Some(last) if last.below_ns == below_ns => last.count = last.count.saturating_add(*count),
            _ => buckets.push(LatencyBucket { below_ns, count: *count }),
        }
    }
    buckets
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn coarse_buckets_have_all_counts_and_are_a_sixteenth_of_a_doubling_wide() {
        let fine = Histogram::of((0..stats::BUCKETS).map(|bucket| (bucket, 1)));
        let merged = coarse(&fine);
        assert_eq!(merged.iter().map(|bucket| bucket.count).sum::<u64>(), stats::BUCKETS as u64);
        for pair in merged.windows(2) {
            let [one, next] = pair else { unreachable!() };
            let width = next.below_ns - one.below_ns;
            assert!(one.below_ns < next.below_ns && (one.below_ns < 512 || width * 16 <= one.below_ns), "{pair:?}");
        }
    }
}

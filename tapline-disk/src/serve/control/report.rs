//! Verbs that are answered at once: the version, statistics, settings and the layers.

use std::os::fd::AsFd;
use std::time::Duration;

use control::answer::{self, InFlight, IoEngine};
use control::{FormatName, Kind, POLLING_MAX_US, THREADS_MAX, VERBS, VERSION, ask};
use disk::Format;
use uring::{EngineKind, ImageFile, RemoteState};

use super::work::{Work, absolute, in_ms};
use crate::files::Handed;
use crate::process::failure::Failure;
use crate::serve::admission::share::{self, Sharing};
use crate::serve::polling::Settings;

/// The maximum duration of a trace in seconds.
const TRACE_MAX: u32 = 3600;

/// Executes `version`.
pub fn version() -> answer::Version {
    answer::Version {
        version: VERSION,
        program: Some(env!("CARGO_PKG_VERSION").into()),
        verbs: VERBS.iter().map(ToString::to_string).collect(),
        pid: Some(std::process::id()),
    }
}

/// Executes `stats`: returns the same as the line written elsewhere.
pub fn stats(work: &Work<'_>) -> answer::Stats {
    answer::Stats { lanes: work.engine.lane_operations(), ..work.stats.reply(work.condition()) }
}

/// Executes `limit`.
pub fn limit(asked: ask::Limit, work: &mut Work<'_>) -> answer::Limited {
    if let Some(limits) = asked.limits {
        let now = ::stats::monotonic();
        work.admission.limiter.set(limits, now);
    }
    let (requests, ns) = work.stats.all_throttled();
    let limits = work.admission.limiter.limits();
    answer::Limited { limits, waiting: work.admission.limiter.waiting(), throttled: requests, throttled_ns: ns }
}

/// Executes `share`.
pub fn share(asked: ask::Share, files: &Handed, work: &mut Work<'_>) -> Result<answer::Shared, Failure> {
    if asked.alone {
        if asked.weight.is_some() || !files.is_empty() {
            return Err(Failure::of(Kind::Invalid, "a disk that is to be alone is given neither a page nor a weight"));
        }
        work.admission.limiter.set_sharing(None);
    }
    if let Some(page) = files.named(share::NAME) {
        let refused = |why: String| Failure::new("share the storage by the page that came with the line", why);
        let page = page.map_err(|error| refused(error.to_string()))?;
        match work.admission.limiter.sharing() {
            Some(sharing) => sharing.move_to(page).map_err(refused)?,
            None => work.admission.limiter.set_sharing(Some(Sharing::in_page(page).map_err(refused)?)),
        }
    }
    match (asked.weight, work.admission.limiter.sharing()) {
        (Some(weight), Some(sharing)) => sharing.set_weight(weight),
        (Some(_), None) => {
            let what = "the disk shares its storage with no other disk, so it can have no weight";
            return Err(Failure::of(Kind::State, what).advise("serve all disks of the storage with --share FILE"));
        }
        (None, _) => {}
    }
    let (held, held_ns) = work.stats.all_shared();
    let waiting = work.admission.limiter.waiting_for_share();
    let Some((sharing, depth)) =
        work.admission.limiter.sharing().and_then(|sharing| Some((sharing.share(), sharing.depth()?)))
    else {
        return Ok(answer::Shared { held, held_ns, ..Default::default() });
    };
    let (weight, others) = (sharing.weight(), sharing.others());
    Ok(answer::Shared { shared: true, weight, depth, others, waiting, held, held_ns })
}

/// Executes `trace`.
pub fn trace(asked: ask::Trace, work: &mut Work<'_>) -> Result<answer::Trace, Failure> {
    let what = "trace the requests of this disk";
    if asked.seconds > TRACE_MAX {
        let why = format!("a trace of {} seconds was requested; at most {TRACE_MAX} are possible", asked.seconds);
        return Err(Failure::new(what, why).of_kind(Kind::Invalid));
    }
    if work.page.file().is_none() {
        let advice = "serve it with --stats-page FILE, or plug it again: its log says why it has none";
        return Err(Failure::new(what, "it has no statistics page").of_kind(Kind::State).advise(advice));
    }
    let until = match asked.seconds {
        0 => 0,
        seconds => ::stats::monotonic() + u64::from(seconds) * 1_000_000_000,
    };
    let page = work.stats.page();
    let next = page.trace(until).map_err(|error| Failure::failed(what, &error))?;
    Ok(answer::Trace { next, kept: ::stats::RECORDS as u64 })
}

/// Executes `polling`.
pub fn polling(asked: ask::Polling, work: &mut Work<'_>) -> Result<answer::Polling, Failure> {
    let now = work.polling.settings();
    let max_us = asked.max_us.unwrap_or(now.most / 1000);
    if max_us > POLLING_MAX_US {
        let why = format!("polling for {max_us} microseconds was requested; at most {POLLING_MAX_US} are possible");
        return Err(Failure::new("set the polling of this disk", why).of_kind(Kind::Invalid));
    }
    let settings = Settings::new(asked.mode.unwrap_or(now.mode), Duration::from_micros(max_us));
    if settings != now {
        work.polling.set(settings);
    }
    let (hits, misses, polled_ns) = work.stats.polls();
    Ok(answer::Polling { mode: settings.mode, max_us, hits, misses, polled_ns })
}

/// Executes `shape`.
pub fn shape(asked: ask::Shape, work: &mut Work<'_>) -> Result<answer::Shape, Failure> {
    if asked != ask::Shape::default() {
        *work.shaping = work.shaping.with_request(asked)?;
        work.engine.set_shape(work.shaping.in_force());
    }
    Ok(work.shaping.reply(work.stats.shaped(work.engine.shape_counts())))
}

/// Executes `threads`.
pub fn threads(asked: ask::Threads, work: &mut Work<'_>) -> Result<answer::Threads, Failure> {
    if let Some(most) = asked.most {
        if !(1..=THREADS_MAX).contains(&most) {
            let why = format!("{most} threads were requested; a disk uses 1 to {THREADS_MAX}");
            return Err(Failure::new("set the threads of this disk", why).of_kind(Kind::Invalid));
        }
        work.threads.set_most(most);
        while work.engine.lane_count() >= most {
            work.engine.end_lane();
        }
    }
    Ok(answer::Threads { most: work.threads.most(), lanes: work.engine.lane_operations() })
}

/// Describes the connection to the server of a layer.
fn server(state: &RemoteState) -> answer::Server {
    answer::Server {
        connected: state.away.is_none(),
        away_ms: state.away.map(in_ms),
        error: state.why.clone(),
        attempts: state.attempts,
        kept: state.kept as u64,
    }
}

/// Executes `layers`. The size is the one that is served: growth that could not be made durable is not visible to
/// peers.
pub fn layers(work: &mut Work<'_>) -> answer::Layers {
    let recorded = work.server.takes_back().and_then(|server| server.records_in_flight());
    let layers = work.disk.layers().iter().enumerate().map(|(depth, layer)| {
        let file = work.engine.file(layer.file);
        let remote = file.and_then(ImageFile::remote);
        // The stand-in of an export has no blocks and no identity.
        let stat = file.filter(|_| remote.is_none()).and_then(|file| rustix::fs::fstat(file.as_fd()).ok());
        let data_file = file.and_then(|file| file.data_file());
        let data_stat = data_file.and_then(|file| rustix::fs::fstat(file.as_fd()).ok());
        let blocks = [stat, data_stat].into_iter().flatten().map(|stat| u64::try_from(stat.st_blocks).unwrap_or(0));
        let blocks: u64 = blocks.sum();
        let path = |file: &ImageFile| match work.stores_nothing() || file.remote().is_some() {
            true => file.path().display().to_string(),
            false => absolute(file.path()).display().to_string(),
        };
        answer::Layer {
            layer: depth,
            format: work.format(depth).unwrap_or(FormatName::Raw),
            path: file.map(path),
            data_file: data_file.map(path),
            size: if depth == 0 { work.geometry.len } else { layer.format.geometry().len },
            // stat(2) counts in units of 512 bytes, whatever the file system's block size.
            allocated: stat.map(|_| blocks.saturating_mul(512)),
            device: stat.map(|stat| stat.st_dev),
            inode: stat.map(|stat| stat.st_ino),
            writable: file.is_some_and(|file| file.options().write),
            server: remote.map(|remote| server(&remote.state())),
        }
    });
    answer::Layers {
        size: work.geometry.len,
        read_only: work.disk.geometry().read_only,
        condition: work.condition(),
        peers: Some(work.server.peers()),
        inflight: recorded.map(|recorded| if recorded { InFlight::Recorded } else { InFlight::InOrder }),
        engine: Some(match work.engine.kind() {
            EngineKind::Uring => IoEngine::Uring,
            EngineKind::Aio => IoEngine::Aio,
            EngineKind::Null | EngineKind::Model(_) => IoEngine::None,
        }),
        changes: work.changes.report(work.disk, work.engine),
        layers: layers.collect(),
    }
}

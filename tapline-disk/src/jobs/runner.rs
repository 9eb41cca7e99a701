//! A disk and its engine, driven by a job instead of a guest.
//!
//! It knows requests and results, and nothing about the purpose of the job. Before a runner is dropped, all submitted
//! requests have completed, whatever happens to the job.

mod merge;

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use control::ImageName;
use disk::{
    Damage, Disk, DiskOffset, Extent, FileDone, Format, Geometry, Image, Io, Layer, Link, Operation, Request,
    ShapePolicy, Span, Status, Token, Until,
};
use memory::Segments;
use transport::Timer;
use uring::{Engine, EngineKind, ImageFile};

use crate::files::Files;
use crate::image::chain::{self, Layers};
use crate::image::damage;
use crate::image::engine_choice::{self, Data};
use crate::image::libvhd::MovedMetadata;
use crate::image::redo_log;
use crate::process::failure::Failure;
use crate::process::log::say;

/// The maximum number of operations in flight: enough to keep an NVMe drive busy with requests of a MiB.
const DEPTH: usize = 64;
/// The identifier of the timer in the engine.
const TIMER: u64 = 0;

/// A disk that a job reads and writes.
pub struct Runner {
    from: Files,
    name: ImageName,
    /// The names of all layers, the image's own first.
    names: Vec<ImageName>,
    geometry: Geometry,
    disk: Disk<Image>,
    engine: Engine,
    done: Vec<FileDone>,
    /// Limits the time of a wait, if a job has requested that.
    timer: Option<Timer>,
    ready: Vec<u64>,
    /// The number of requests submitted and not yet received as completed.
    in_flight: usize,
    /// The engine has failed: requests in the disk will never complete.
    broken: bool,
}

/// The result of a completed request.
pub struct Answer {
    /// The extents found by [`Operation::Extents`].
    pub extents: Vec<Extent>,
}

impl Runner {
    /// Makes a disk from `layers`.
    pub fn new(layers: Layers, kind: Option<EngineKind>) -> Result<Runner, Failure> {
        let Layers { name, from, names, files, images, logs, unsettled, .. } = layers;
        let block = disk::Options::default().block;
        let disk = chain::disk_of(images, logs, &unsettled, block)
            .map_err(|error| crate::process::failure::explain(&name, error))?;
        let engine = engine_choice::open(&name, kind, files, DEPTH, Data::Own)?;
        Ok(Runner {
            from,
            geometry: disk.geometry(),
            name,
            names,
            disk,
            engine,
            done: Vec::new(),
            timer: None,
            ready: Vec::new(),
            in_flight: 0,
            broken: false,
        })
    }

    /// Sets how transfers are split and merged.
    pub fn set_shape(&mut self, policy: ShapePolicy) {
        self.engine.set_shape(policy);
    }

    /// Returns the source of its files.
    pub fn from(&self) -> &Files {
        &self.from
    }

    /// Returns the size and the limits.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns a layer of the current chain, and its file.
    pub fn layer(&self, depth: usize) -> Option<(&Image, &ImageFile)> {
        let layer = self.disk.layers().get(depth)?;
        Some((&layer.format, self.engine.file(layer.file)?))
    }

    /// Makes a layer record another parent on which its contents are the same, or none; durable with the next flush.
    /// After this only a flush may be requested: the disk still uses the old parents.
    pub fn relink(&mut self, depth: usize, link: Option<&Link>) -> Result<(), Failure> {
        let name = self.disk.layers().get(depth).and_then(|layer| self.names.get(usize::from(layer.file.0)));
        let Some(name) = name else { unreachable!("the chain has a layer {depth}") };
        let relinked = self.disk.layer_mut(depth).and_then(|layer| layer.relink(link));
        relinked.map_err(|error| Failure::new(record(name, link), error))
    }

    /// Returns the layers whose metadata is behind their blocks.
    pub fn behind(&self) -> MovedMetadata {
        let named = |layer: &Layer<Image>| self.names.get(usize::from(layer.file.0)).cloned();
        MovedMetadata::of(self.disk.layers().iter().filter_map(|layer| Some((named(layer)?, &layer.format))))
    }

    /// Returns the number of requests submitted and not yet received as completed.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Submits a request without waiting.
    pub fn submit(&mut self, operation: Operation, span: Span, memory: Segments, token: Token) -> Result<(), Failure> {
        match Request::new(operation, span, memory, token, &self.geometry) {
            Ok(request) => {
                self.disk.submit(request, &mut self.engine);
                self.in_flight += 1;
                Ok(())
            }
            Err(status) => Err(self.failure(operation, span, status)),
        }
    }

    /// Waits for the next completed request. A request that failed is a failure of the job.
    pub fn wait(&mut self) -> Result<Answer, Failure> {
        self.wait_for_any().and_then(|(_, answer)| answer)
    }

    /// Like [`Runner::wait`], for a job that continues when a request has failed; returns the request's token too. The
    /// call itself fails only with the engine.
    pub fn wait_for_any(&mut self) -> Result<(Token, Result<Answer, Failure>), Failure> {
        loop {
            if let Some(completed) = self.take_completed() {
                return Ok(completed);
            }
            self.step()?;
        }
    }

    /// Like [`Runner::wait_for_any`], but waits no longer than `until`. Submits requests to the kernel in any case.
    #[allow(clippy::type_complexity, reason = "like `wait_for_any`, as an option")]
    pub fn wait_until(&mut self, until: Instant) -> Result<Option<(Token, Result<Answer, Failure>)>, Failure> {
        let mut submitted = false;
        loop {
            if let Some(completed) = self.take_completed() {
                return Ok(Some(completed));
            }
            let left = until.saturating_duration_since(Instant::now());
            if submitted && left.is_zero() {
                return Ok(None);
            }
            submitted = true;
            if left.is_zero() {
                self.step_until(Until::Now)?;
            } else if self.in_flight == 0 {
                std::thread::sleep(left);
            } else {
                self.set_timer(left).map_err(|error| Failure::new("wait for a time", error))?;
                self.step()?;
            }
        }
    }

    /// Limits the next wait of the engine to this time.
    fn set_timer(&mut self, left: Duration) -> io::Result<()> {
        let timer = match self.timer.take() {
            Some(timer) => timer,
            None => {
                let timer = Timer::new()?;
                self.engine.watch(timer.as_fd(), false, TIMER)?;
                timer
            }
        };
        timer.set(left)?;
        self.timer = Some(timer);
        Ok(())
    }

    fn take_completed(&mut self) -> Option<(Token, Result<Answer, Failure>)> {
        let (mut request, status) = self.disk.answer()?;
        self.in_flight -= 1;
        let (operation, span) = (request.operation(), request.span());
        let extents = request.take_extents();
        let token = request.retire();
        let answer = match status {
            Status::Done => Ok(Answer { extents }),
            other => Err(self.failure(operation, span, other)),
        };
        Some((token, answer))
    }

    /// Executes one request; nothing else may be in flight.
    pub fn execute(&mut self, operation: Operation, span: Span) -> Result<Answer, Failure> {
        self.submit(operation, span, Segments::empty(), Token(0))?;
        self.wait()
    }

    /// Waits for all requests in flight.
    pub fn wait_for_all(&mut self) -> Result<(), Failure> {
        while self.in_flight > 0 {
            self.wait()?;
        }
        Ok(())
    }

    /// Waits for all requests in flight and flushes the disk.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.wait_for_all()?;
        self.execute(Operation::Flush, Span { at: DiskOffset(0), len: 0 }).map(drop)
    }

    /// Waits for an event of the engine, and passes it to the disk.
    fn step(&mut self) -> Result<(), Failure> {
        self.step_until(Until::Any)
    }

    fn step_until(&mut self, until: Until) -> Result<(), Failure> {
        if let Err(error) = self.engine.reap(until, &mut self.done) {
            self.broken = true;
            return Err(Failure::new(format!("continue {}", self.name), error));
        }
        for done in self.done.drain(..) {
            self.disk.settle(done, &mut self.engine);
        }
        self.disk.retry(&mut self.engine);
        if self.timer.is_some() {
            // Whether it has expired is checked by the clock.
            self.engine.take_ready(&mut self.ready);
            self.ready.clear();
        }
        Ok(())
    }

    fn failure(&mut self, operation: Operation, span: Span, status: Status) -> Failure {
        let tried = format!("{} {} bytes at {} of {}", verb(operation), span.len, span.at, self.name);
        match status {
            Status::NoSpace => Failure::new(tried, "no space is left on its storage")
                .advise("free some space on that file system, then run the command again"),
            Status::Refused => {
                Failure::new(tried, "it does not accept writes: it is read-only, or an earlier sync failed")
            }
            Status::Unsupported => Failure::new(tried, "the request is outside the disk or not supported"),
            Status::Failed | Status::Done => match self.disk.take_damage(span) {
                Some(damage) => self.damaged(tried, damage),
                None if self.name.uri().is_some() => {
                    Failure::new(tried, "the NBD server failed, or was away for too long")
                        .advise("see the log of its server")
                }
                None => Failure::new(tried, "the storage failed").advise("see the kernel log for the reason"),
            },
        }
    }

    /// Explains damaged metadata of a layer: which bytes of the disk are lost, and what may repair it.
    fn damaged(&self, tried: String, met: Damage) -> Failure {
        let name = self.names.get(usize::from(met.file.0)).unwrap_or(&self.name);
        let advice = match name.format.is_read_only() {
            true => format!("copy what can be read: tapline image convert {name} qcow2:NEW --salvage"),
            false => format!("the rest of the disk is intact; {}", damage::advice(met, name)),
        };
        Failure::new(tried, damage::why_unreadable(met, name)).advise(advice)
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        // A job that fails leaves requests behind; the kernel owns their memory until they complete.
        while self.in_flight > 0 && !self.broken {
            match self.disk.answer() {
                Some((request, _)) => {
                    self.in_flight -= 1;
                    request.retire();
                }
                // The loop's condition checks whether the engine has failed.
                None => drop(self.step()),
            }
        }
        if self.disk.is_broken() && self.name.uri().is_none() {
            for layer in self.disk.layers().iter().filter(|layer| !layer.format.geometry().read_only) {
                if let (Some(name), Some(file)) =
                    (self.names.get(usize::from(layer.file.0)), self.engine.file(layer.file))
                {
                    redo_log::record_failed_sync(&self.from, name, file);
                }
            }
        }
        if self.broken {
            // They will never complete; the process exits with the failure that `step` has returned.
            say(format_args!("{} requests on {} never completed", self.in_flight, self.name));
            std::process::exit(i32::from(crate::process::failure::Exit::Failed.code()));
        }
    }
}

fn record(name: &ImageName, link: Option<&Link>) -> String {
    match link {
        Some(link) => format!("record the parent {} in {name}", link.relative),
        None => format!("record in {name} that it has no parent"),
    }
}

fn verb(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "read",
        Operation::Write { .. } | Operation::Patch { .. } => "write",
        Operation::Flush => "flush",
        Operation::Discard => "discard",
        Operation::WriteZeroes { .. } => "zero",
        Operation::Extents { .. } => "look up",
    }
}

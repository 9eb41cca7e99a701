//! The verb that is under way: which one it is, driven and taken back alike.
//!
//! Knows nothing about clients.

use serde_json::Value;

use super::protocol::{self, Method};
use super::refusal::Refusal;
use super::work::Work;
use super::{clone, copy, resize, revert, snapshot, standstill};

/// A verb that takes time.
#[derive(Debug)]
pub enum Job {
    Pausing(standstill::Pausing),
    Resuming(standstill::Resuming),
    Snapshot(Box<snapshot::Snapshot>),
    Copy(Box<copy::Copy>),
    Revert(Box<revert::Revert>),
    Clone(clone::Clone),
    Resize(resize::Resize),
}

impl Job {
    /// Its name.
    pub fn verb(&self) -> &'static str {
        match self {
            Job::Pausing(_) => "pause",
            Job::Resuming(_) => "resume",
            Job::Snapshot(_) | Job::Copy(_) => "snapshot",
            Job::Revert(_) => "revert",
            Job::Clone(_) => "clone",
            Job::Resize(_) => "resize",
        }
    }

    /// Goes on; the answer, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        match self {
            Job::Pausing(job) => job.advance(work),
            Job::Resuming(job) => job.advance(work),
            Job::Snapshot(job) => job.advance(work),
            Job::Copy(job) => job.advance(work),
            Job::Revert(job) => job.advance(work),
            Job::Clone(job) => job.advance(work),
            Job::Resize(job) => job.advance(work),
        }
    }

    /// Takes back what has happened so far: it has failed.
    pub fn undo(&mut self, work: &mut Work<'_>) {
        match self {
            Job::Snapshot(job) => job.undo(work),
            Job::Copy(job) => job.undo(work),
            Job::Revert(job) => job.undo(work),
            Job::Resize(job) => job.undo(work),
            Job::Pausing(_) | Job::Resuming(_) | Job::Clone(_) => work.let_go(),
        }
    }
}

/// Which way a snapshot goes.
pub fn snapshot(asked: protocol::Snapshot, work: &mut Work<'_>) -> Result<Job, Refusal> {
    let protocol::Snapshot { to, method } = asked;
    let by_reflink = match method {
        Method::Reflink => true,
        Method::Auto => copy::is_thinkable(&to, work),
        Method::Chain => false,
    };
    Ok(match by_reflink {
        true => Job::Copy(Box::new(copy::Copy::begin(to, work)?)),
        false => Job::Snapshot(Box::new(snapshot::Snapshot::begin(to, work)?)),
    })
}

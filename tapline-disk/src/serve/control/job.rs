//! The verb in progress: a uniform interface to advance, report and undo any verb.
//!
//! It knows nothing about clients. The answer of a verb that quiesces the disk is delayed until the guest receives its
//! first completion again, so that it can include the length of the pause; the verb is done before, and cannot fail any
//! more.

use control::Kind;
use control::answer::Answer;
use control::ask::{self, Method};

use super::work::Work;
use super::{clone, copy, finish, resize, revert, snapshot, standstill, track, upgrade};
use crate::files::AtHand;
use crate::process::failure::Failure;

/// A verb that takes several steps.
#[derive(Debug)]
pub struct Job {
    verb: &'static str,
    steps: Steps,
    /// The answer of a verb that is done, while the length of the pause is not known yet.
    answer: Option<Answer>,
    /// Keeps the files passed with the request available.
    _at_hand: Option<AtHand>,
}

/// The state of each kind of verb.
#[derive(Debug)]
pub enum Steps {
    Pausing(standstill::Pausing),
    Resuming,
    Snapshot(Box<snapshot::Snapshot>),
    Copy(Box<copy::Copy>),
    Revert(Box<revert::Revert>),
    Clone(clone::Clone),
    Resize(resize::Resize),
    Finish(finish::Finish),
    Upgrade(Box<upgrade::Upgrade>),
    Track(Box<track::Track>),
}

impl Job {
    /// Makes a job of a verb that has begun.
    pub fn new(verb: &'static str, steps: Steps, at_hand: Option<AtHand>) -> Job {
        Job { verb, steps, answer: None, _at_hand: at_hand }
    }

    /// Advances the verb; returns the answer at its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        if self.answer.is_none() {
            self.answer = self.steps.advance(work)?;
        }
        if self.steps.reports_pause() && !work.paused {
            let Some(answer) = &mut self.answer else { return Ok(None) };
            match work.pause.measured() {
                Some(measured) => answer.set_pause(measured.into()),
                None => return Ok(None),
            }
        }
        Ok(self.answer.take())
    }

    /// Returns the verb's word.
    pub fn verb(&self) -> &'static str {
        self.verb
    }

    /// Returns whether requests stay held at its end.
    pub fn is_pausing(&self) -> bool {
        matches!(self.steps, Steps::Pausing(_))
    }

    /// Returns whether it is the end of a merge.
    pub fn is_merging(&self) -> bool {
        matches!(self.steps, Steps::Finish(_))
    }

    /// Returns the upgrade, if it is one.
    pub fn as_upgrade(&mut self) -> Option<&mut upgrade::Upgrade> {
        match &mut self.steps {
            Steps::Upgrade(steps) => Some(steps),
            _ => None,
        }
    }

    /// Undoes a failed upgrade.
    pub fn undo(&mut self, work: &mut Work<'_>) {
        // Plans undo their own steps.
        if let Steps::Upgrade(steps) = &mut self.steps {
            steps.undo(work);
        }
    }
}

impl Steps {
    fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        match self {
            Steps::Pausing(steps) => steps.advance(work),
            Steps::Resuming => Ok(Some(standstill::resume(work))),
            Steps::Snapshot(steps) => steps.advance(work),
            Steps::Copy(steps) => steps.advance(work),
            Steps::Revert(steps) => steps.advance(work),
            Steps::Clone(steps) => steps.advance(work),
            Steps::Resize(steps) => steps.advance(work),
            Steps::Finish(steps) => steps.advance(work),
            Steps::Upgrade(steps) => steps.advance(work),
            Steps::Track(steps) => steps.advance(work),
        }
    }

    /// Returns whether the answer reports the pause seen by the guest. An explicit pause has not ended yet, a clone and
    /// the end of a merge delay no requests, and during a revert no client is connected.
    fn reports_pause(&self) -> bool {
        match self {
            Steps::Resuming | Steps::Snapshot(_) | Steps::Copy(_) | Steps::Resize(_) | Steps::Track(_) => true,
            Steps::Pausing(_) | Steps::Revert(_) | Steps::Clone(_) | Steps::Finish(_) | Steps::Upgrade(_) => false,
        }
    }
}

/// Starts a snapshot, by reflink or by a chain.
pub fn snapshot(asked: ask::Snapshot, work: &mut Work<'_>) -> Result<Steps, Failure> {
    let ask::Snapshot { to, method, map, new } = asked;
    let by_reflink = match method {
        Method::Reflink => true,
        Method::Auto => map.is_none() && copy::reflink_possible(&to, work),
        Method::Chain => false,
    };
    Ok(match by_reflink {
        true if map.is_some() => {
            let what = "a copy that shares blocks does not end the interval of a map of changed blocks";
            return Err(Failure::of(Kind::Unsupported, what).advise("use --method chain, or omit --map"));
        }
        true => Steps::Copy(Box::new(copy::Copy::begin(to, work)?)),
        false => Steps::Snapshot(Box::new(snapshot::Snapshot::begin(to, map, new, work)?)),
    })
}

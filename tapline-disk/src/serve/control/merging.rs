//! The merge that runs concurrently with other verbs, as seen by the control socket: which client has requested it,
//! whether that follows its progress, and what is reported at its end.

use control::answer::{self, Answer, MergeState};
use control::{Kind, Reply, ask};

use super::merge::MergeJob;
use super::work::Work;
use super::{Asker, Control};
use crate::files::AtHand;
use crate::process::failure::Failure;
use crate::serve::own_keys::MERGE_TIMER;

/// The running merge.
#[derive(Debug)]
pub struct Merging {
    /// The merge itself.
    pub merge: Box<MergeJob>,
    /// The client that is still to receive an answer.
    asker: Option<Asker>,
    /// Whether the answer follows at its end, after progress lines.
    follow: bool,
    /// The last reported percentage.
    percent: u64,
    /// Keeps the files passed with the request available.
    _at_hand: Option<AtHand>,
}

impl Control {
    /// Returns the running merge.
    fn running_merge(&mut self) -> Result<&mut MergeJob, Failure> {
        match &mut self.merging {
            Some(merging) => Ok(&mut merging.merge),
            None => {
                Err(Failure::of(Kind::State, "no merge is running").advise("merge-status shows how the last one ended"))
            }
        }
    }

    /// Changes the running merge; returns its status.
    pub(super) fn tell_merge(&mut self, tell: impl FnOnce(&mut MergeJob)) -> Result<answer::Merge, Failure> {
        let merge = self.running_merge()?;
        tell(merge);
        Ok(merge.status())
    }

    /// Executes `merge-status`.
    pub(super) fn merge_status(&self) -> answer::Merge {
        match (&self.merging, &self.merged) {
            (Some(merging), _) => merging.merge.status(),
            (None, Some(merged)) => merged.clone(),
            (None, None) => answer::Merge { state: MergeState::None, ..answer::Merge::default() },
        }
    }

    /// Executes `merge`.
    pub(super) fn begin_merging(
        &mut self,
        asked: ask::Merge,
        at_hand: Option<AtHand>,
        asker: &Asker,
        work: &mut Work<'_>,
    ) -> Result<(), Failure> {
        let follow = asked.follow;
        let merge = Box::new(MergeJob::begin(asked, work)?);
        self.merging = Some(Merging { merge, asker: Some(asker.clone()), follow, percent: 0, _at_hand: at_hand });
        if let Some(client) = self.client(asker) {
            client.begin_reply();
        }
        self.go_on_merging(work);
        Ok(())
    }

    /// Drives the merge, unless another verb still needs the disk.
    pub(super) fn go_on_merging(&mut self, work: &mut Work<'_>) {
        let Some(mut merging) = self.merging.take() else { return };
        let upgrade = self.job.as_mut().and_then(|(job, _)| job.as_upgrade());
        let (upgrading, in_the_way) = (upgrade.is_some(), upgrade.is_some_and(|upgrade| upgrade.needs_no_merge()));
        if in_the_way {
            merging.merge.cancel();
        }
        let blocked = self.paused || (self.job.is_some() && !upgrading);
        let waits = blocked && !merging.merge.is_switching();
        let outcome = if waits { Ok(None) } else { merging.merge.advance(work) };
        let outcome = match outcome {
            Ok(None) => {
                self.report_merging(&mut merging);
                self.merging = Some(merging);
                return;
            }
            Ok(Some(merged)) => Ok(merged),
            Err(refusal) if in_the_way && refusal.kind() == Kind::Cancelled => Err(replaced()),
            Err(refusal) => Err(refusal),
        };
        work.let_go();
        work.engine.forget(MERGE_TIMER.0);
        self.merged = Some(match &outcome {
            Ok(merged) => merged.clone(),
            Err(refusal) => stopped(&merging.merge, refusal),
        });
        // A client that receives the answer may reuse the passed files, and must not find them locked.
        let asker = merging.asker.take();
        drop(merging);
        self.reply(asker.as_ref(), outcome.map(Answer::from));
        if in_the_way {
            // The upgrade that has waited for this must continue now.
            self.go_on(work);
        }
    }

    /// Reports the progress to the client that follows it.
    fn report_merging(&mut self, merging: &mut Merging) {
        if !merging.merge.has_begun() {
            return;
        }
        if !merging.follow {
            let begun = merging.asker.take();
            return self.reply(begun.as_ref(), Ok(merging.merge.status().into()));
        }
        let percent = merging.merge.percent();
        let Some(asker) = merging.asker.as_ref().filter(|_| percent != merging.percent) else { return };
        merging.percent = percent;
        if let Some(client) = self.client(asker) {
            client.mention(&Reply::<(), _>::Event(merging.merge.status()).line(&asker.id));
        }
    }
}

fn replaced() -> Failure {
    let what = "the merge was interrupted because another process is taking over the disk";
    Failure::of(Kind::Replaced, what).advise("request it again to continue where it stopped")
}

/// Returns how a merge ended that was not completed: its progress, and why.
fn stopped(merge: &MergeJob, refusal: &Failure) -> answer::Merge {
    let state = match refusal.kind() {
        Kind::Cancelled | Kind::Replaced => MergeState::Cancelled,
        _ => MergeState::Failed,
    };
    answer::Merge { state, error: Some(refusal.clone().into()), ..merge.status() }
}

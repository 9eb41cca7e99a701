//! The merge that runs concurrently with other verbs, from the control socket's view: which client requested it, which
//! clients follow its progress, and what remains to be reported when it has ended.

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
    /// What it does.
    pub merge: Box<MergeJob>,
    /// Who is still to be answered.
    asker: Option<Asker>,
    /// Whether the answer comes at its end, after progress lines.
    follow: bool,
    /// The last percentage reported.
    percent: u64,
    /// The files that came with the request.
    _at_hand: Option<AtHand>,
}

impl Control {
    /// The merge, to be told something.
    fn running_merge(&mut self) -> Result<&mut MergeJob, Failure> {
        match &mut self.merging {
            Some(merging) => Ok(&mut merging.merge),
            None => {
                Err(Failure::of(Kind::State, "no merge is running").advise("merge-status shows how the last one ended"))
            }
        }
    }

    /// Has the merge do something; the answer is how it is then.
    pub(super) fn tell_merge(&mut self, tell: impl FnOnce(&mut MergeJob)) -> Result<Option<Answer>, Failure> {
        let merge = self.running_merge()?;
        tell(merge);
        Ok(Some(merge.status().into()))
    }

    /// `merge-status`.
    pub(super) fn merge_status(&self) -> answer::Merge {
        match (&self.merging, &self.merged) {
            (Some(merging), _) => merging.merge.status(),
            (None, Some(merged)) => merged.clone(),
            (None, None) => answer::Merge { state: MergeState::None, ..answer::Merge::default() },
        }
    }

    /// `merge`.
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

    /// Drives the merge, unless another verb needs the disk still.
    pub(super) fn go_on_merging(&mut self, work: &mut Work<'_>) {
        let Some(mut merging) = self.merging.take() else { return };
        let upgrade = self.job.as_mut().and_then(|(job, _)| job.as_upgrade());
        let (upgrading, in_the_way) = (upgrade.is_some(), upgrade.is_some_and(|upgrade| upgrade.needs_no_merge()));
        if in_the_way {
            merging.merge.cancel();
        }
        let held_up = self.paused || (self.job.is_some() && !upgrading);
        let waits = held_up && !merging.merge.is_switching();
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
        // Whoever hears the answer may use what was handed for it, and is not to find it locked.
        let asker = merging.asker.take();
        drop(merging);
        self.reply(asker.as_ref(), outcome.map(Answer::from));
        if in_the_way {
            // Nothing else may happen that would have the upgrade go on.
            self.go_on(work);
        }
    }

    /// Reports the merge's progress to interested clients.
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

/// How a merge that was not done has ended: where it was, and why.
fn stopped(merge: &MergeJob, refusal: &Failure) -> answer::Merge {
    let state = match refusal.kind() {
        Kind::Cancelled | Kind::Replaced => MergeState::Cancelled,
        _ => MergeState::Failed,
    };
    answer::Merge { state, error: Some(refusal.clone().into()), ..merge.status() }
}

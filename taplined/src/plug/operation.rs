//! Operations in progress on VBDs: at most one per VBD, which another one may abort.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{Code, Problem};
use tokio::sync::watch;
use uuid::Uuid;

/// The running operations, by VBD.
#[derive(Clone, Debug, Default)]
pub struct Operations(Arc<Mutex<HashMap<Uuid, Entry>>>);

#[derive(Debug)]
struct Entry {
    kind: Kind,
    cancel: watch::Sender<bool>,
}

/// The operation on a VBD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A plug.
    Plug,
    /// The replacement of its disk process.
    Upgrade,
    /// An unplug, once its guest has released the disk.
    Unplug,
    /// An unplug by force, whether or not its guest releases the disk.
    ForcedUnplug,
}

impl Kind {
    /// The operation as a participle, for messages.
    fn participle(self) -> &'static str {
        match self {
            Kind::Plug => "plugged",
            Kind::Upgrade => "upgraded",
            Kind::Unplug | Kind::ForcedUnplug => "unplugged",
        }
    }
}

/// An operation in progress; dropping it ends it.
#[derive(Debug)]
pub struct Operation {
    vbd: Uuid,
    operations: Operations,
    cancelled: watch::Receiver<bool>,
}

impl Operations {
    fn entries(&self) -> MutexGuard<'_, HashMap<Uuid, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an operation; refused while another one is in progress on the VBD.
    pub fn begin(&self, vbd: Uuid, kind: Kind) -> Result<Operation, Problem> {
        let mut entries = self.entries();
        if let Some(other) = entries.get(&vbd) {
            let doing = other.kind.participle();
            let what = format!("VBD {vbd} is being {doing}");
            return Err(Problem::new(Code::Busy, what).advise("wait for that task or cancel it"));
        }
        let (cancel, cancelled) = watch::channel(false);
        entries.insert(vbd, Entry { kind, cancel });
        Ok(Operation { vbd, operations: self.clone(), cancelled })
    }

    /// Begins an unplug. It aborts a plug, and an unplug with force aborts one without. An upgrade is aborted too, or
    /// waited for if it can no longer be aborted.
    pub async fn begin_unplug(&self, vbd: Uuid, force: bool) -> Result<Operation, Problem> {
        let kind = if force { Kind::ForcedUnplug } else { Kind::Unplug };
        loop {
            let other = {
                let entries = self.entries();
                let other = entries.get(&vbd).map(|entry| (entry.kind, entry.cancel.clone()));
                other.filter(|(other, _)| match other {
                    Kind::Plug | Kind::Upgrade => true,
                    Kind::Unplug => force,
                    Kind::ForcedUnplug => false,
                })
            };
            match other {
                None => return self.begin(vbd, kind),
                Some((_, cancel)) => {
                    cancel.send_replace(true);
                    cancel.closed().await;
                }
            }
        }
    }
}

impl Operation {
    /// Waits for `work`, but only until another operation aborts this one.
    pub async fn unless_cancelled<T>(&self, work: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
        let mut asked = self.cancelled.clone();
        tokio::select! {
            done = work => done,
            Ok(_) = asked.wait_for(|asked| *asked) => {
                Err(Problem::new(Code::Cancelled, format!("VBD {} was unplugged in the meantime", self.vbd)))
            }
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // Before the receiver is dropped, for which the next operation waits.
        self.operations.entries().remove(&self.vbd);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test]
    async fn one_operation_at_a_time_and_an_unplug_aborts_a_plug() {
        let operations = Operations::default();
        let vbd = Uuid::new_v4();
        let plug = operations.begin(vbd, Kind::Plug).unwrap();
        assert_eq!(operations.begin(vbd, Kind::Plug).unwrap_err().code, Code::Busy);
        let plugging =
            tokio::spawn(async move { plug.unless_cancelled(std::future::pending::<Result<(), _>>()).await });
        let unplug = operations.begin_unplug(vbd, false).await.unwrap();
        assert_eq!(plugging.await.unwrap().unwrap_err().code, Code::Cancelled);
        assert_eq!(operations.begin_unplug(vbd, false).await.unwrap_err().code, Code::Busy);
        let waiting =
            tokio::spawn(async move { unplug.unless_cancelled(std::future::pending::<Result<(), _>>()).await });
        let forced = operations.begin_unplug(vbd, true).await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap_err().code, Code::Cancelled);
        assert_eq!(operations.begin(vbd, Kind::Plug).unwrap_err().code, Code::Busy);
        drop(forced);
        operations.begin(vbd, Kind::Plug).unwrap();
    }

    #[tokio::test]
    async fn an_unplug_aborts_an_upgrade_and_nothing_else_runs_concurrently() {
        let operations = Operations::default();
        let vbd = Uuid::new_v4();
        let upgrade = operations.begin(vbd, Kind::Upgrade).unwrap();
        for kind in [Kind::Plug, Kind::Upgrade] {
            let busy = operations.begin(vbd, kind).unwrap_err();
            assert_eq!((busy.code, busy.detail), (Code::Busy, format!("VBD {vbd} is being upgraded")));
        }
        let upgrading =
            tokio::spawn(async move { upgrade.unless_cancelled(std::future::pending::<Result<(), _>>()).await });
        let unplug = operations.begin_unplug(vbd, false).await.unwrap();
        assert_eq!(upgrading.await.unwrap().unwrap_err().code, Code::Cancelled);
        assert_eq!(operations.begin(vbd, Kind::Upgrade).unwrap_err().code, Code::Busy);
        drop(unplug);
    }
}

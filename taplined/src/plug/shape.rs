//! Sends a running disk process the rules for splitting and merging the transfers of its repository's disks
//! (docs/decisions/0049): the configured sizes, and the policy measured on its storage.
//!
//! Each process gets them when its supervision begins, like its share, and all processes of a repository when
//! something changes. They are in the catalogue first, so sending them is idempotent. Invariants: the last rules sent
//! to a process are those in the catalogue; a policy measured on other storage than the repository's is never
//! followed.

use ::control::answer::{NOT_FOLLOWED, PolicyNote};
use ::control::{SizeRule, ask};
use api::{Problem, Sr, SrPolicy};
use uuid::Uuid;

use super::push_settings;
use crate::daemon::Daemon;
use crate::disk::live;

/// Sends the rules to a process whose supervision has begun, in the background.
pub fn send_later(daemon: &Daemon, vbd: Uuid) {
    let daemon = daemon.clone();
    push_settings::send_in_background(vbd, async move {
        push_settings::send_or_retry(&daemon, vbd, |daemon, vbd| async move { set(&daemon, vbd).await }).await
    });
}

/// Sends the rules to the processes of all plugged disks of a repository, in the background.
pub async fn send_to_all(daemon: &Daemon, sr: Uuid) {
    match daemon.catalogue.read(move |view| view.plugged_in_sr(sr)).await {
        Ok(vbds) => vbds.into_iter().for_each(|vbd| send_later(daemon, vbd)),
        Err(problem) => tracing::error!(%sr, "the sizes of transfers could not be sent to its disks: {problem}"),
    }
}

/// Sends the rules once.
async fn set(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let now = || {
        daemon.catalogue.read(move |view| {
            let sr = view.sr(view.vdi(view.vbd(vbd)?.vdi)?.sr)?;
            Ok(rules_of(&sr))
        })
    };
    push_settings::send_until_current(now, |next| send(daemon, vbd, next)).await
}

async fn send(daemon: &Daemon, vbd: Uuid, verb: ask::Shape) -> Result<(), Problem> {
    let recorded = "the sizes of transfers of its repository are";
    let sent = live::ask(daemon, vbd, verb, Vec::new()).await;
    sent.map(drop).map_err(|refused| push_settings::not_applied(refused, recorded, "plugging it again has them, too"))
}

/// The rules for the disks of a repository.
fn rules_of(sr: &Sr) -> ask::Shape {
    let (policy, is_used) = match sr.policy_in_force() {
        Ok(policy) => (policy.map(|policy| note(sr.uuid, policy)), policy.is_some()),
        // The reason is passed on, to be shown with the disk.
        Err(problem) => {
            let unused = |policy: &SrPolicy| PolicyNote {
                split: None,
                merge: None,
                why: format!("{NOT_FOLLOWED}{}", problem.detail),
                ..note(sr.uuid, policy)
            };
            (sr.policy.as_ref().map(unused), true)
        }
    };
    let rule = |rule| match rule {
        api::SizeRule::Bytes(bytes) => SizeRule::Bytes(bytes),
        api::SizeRule::Auto if is_used => SizeRule::Auto,
        api::SizeRule::Auto | api::SizeRule::None => SizeRule::None,
    };
    ask::Shape { split: Some(rule(sr.split)), merge: Some(rule(sr.merge)), recorded: true, policy }
}

fn note(sr: Uuid, policy: &SrPolicy) -> PolicyNote {
    PolicyNote {
        file: String::new(),
        repository: Some(sr.to_string()),
        device: policy.device.name.clone(),
        measured: policy.measured.to_string(),
        kernel: policy.kernel.clone(),
        split: policy.split,
        merge: policy.merge,
        why: policy.why.clone(),
    }
}

#[cfg(test)]
mod test {
    use api::{CalibrationOperation, SrSource, Storage};

    use super::*;

    fn storage(id: &str) -> Storage {
        Storage { id: id.into(), name: format!("disk {id}") }
    }

    fn sr(device: Option<&str>) -> Sr {
        let source = SrSource::Dir { path: "/srv".parse().unwrap() };
        let mut sr = crate::sr::new_sr(Uuid::new_v4(), "a".parse().unwrap(), api::Description::default(), source, 0);
        sr.policy = Some(SrPolicy {
            device: storage("a"),
            measured: jiff::Timestamp::UNIX_EPOCH,
            operation: CalibrationOperation::Write,
            split: Some(16_384),
            merge: None,
            gain: 1.2,
            worst: 1.0,
            why: "it gained".into(),
            program: "1".into(),
            kernel: "6".into(),
        });
        sr.variant = device.map(|device| api::Variant {
            filesystem: "ext4".into(),
            versions: api::Versions::Chain,
            format: api::ImageFormat::Qcow2,
            formats: Vec::new(),
            read_only: false,
            path: "/srv".parse().unwrap(),
            device: Some(storage(device)),
            notes: Vec::new(),
        });
        sr
    }

    #[test]
    fn a_policy_is_followed_on_its_own_storage_only() {
        let own = rules_of(&sr(Some("a")));
        assert_eq!((own.split, own.merge), (Some(SizeRule::Auto), Some(SizeRule::Auto)));
        assert_eq!(own.policy.as_ref().unwrap().split, Some(16_384));
        for other in [sr(Some("b")), sr(None)] {
            let note = rules_of(&other).policy.unwrap();
            assert_eq!((note.split, note.merge), (None, None));
            assert!(note.why.contains("was measured on disk a"), "{}", note.why);
        }
        assert!(rules_of(&sr(Some("b"))).policy.unwrap().why.contains("is on disk b"));
    }

    #[test]
    fn without_a_policy_auto_is_nothing_and_sizes_that_are_set_hold() {
        let sr = Sr { policy: None, split: api::SizeRule::Bytes(65_536), ..sr(Some("a")) };
        let rules = rules_of(&sr);
        assert_eq!((rules.split, rules.merge), (Some(SizeRule::Bytes(65_536)), Some(SizeRule::None)));
    }
}

//! How a disk's transfers are split and merged: the requested rules, and the resulting sizes.
//!
//! It does not do that itself ([`disk::Shape`]). Invariant: the sizes in force depend on the requested rules and on the
//! policy alone; both are passed to the successor of this process, which reads no file for that.

use std::path::Path;

use control::answer::{self, PolicyNote};
use control::calibration::Sizes;
use control::{ImageName, Kind, SizeRule, ask};
use disk::{ShapeCounts, ShapePolicy};
use serde::{Deserialize, Serialize};
use uring::ImageFile;

use crate::files::policy;
use crate::process::failure::Failure;
use arguments::Serve;

/// The sizes of a disk's transfers, also as passed to the successor of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shaping {
    split: SizeRule,
    merge: SizeRule,
    policy: Option<PolicyNote>,
}

impl Shaping {
    /// Returns the rules of the command line, for an image with this file.
    pub fn of(serve: &Serve, name: &ImageName, file: Option<&ImageFile>) -> Result<Shaping, Failure> {
        let policy = serve.io_policy.as_deref().map(|path| policy_of(path, name, file)).transpose()?;
        let unless_given = if policy.is_some() { SizeRule::Auto } else { SizeRule::None };
        let [split, merge] = [serve.io_split, serve.io_merge].map(|rule| rule.unwrap_or(unless_given));
        Shaping { policy, ..Shaping::default() }.changed(Some(split), Some(merge))
    }

    /// Returns these rules with the given changes.
    pub fn changed(&self, split: Option<SizeRule>, merge: Option<SizeRule>) -> Result<Shaping, Failure> {
        let (split, merge) = (split.unwrap_or(self.split), merge.unwrap_or(self.merge));
        if self.policy.is_none() && [split, merge].contains(&SizeRule::Auto) {
            let why = "auto follows a policy, and the disk has none";
            return Err(Failure::new("set how transfers are split and merged", why)
                .of_kind(Kind::Invalid)
                .advise("measure the storage with tapline calibrate, and serve the disk with --io-policy FILE"));
        }
        Ok(Shaping { split, merge, policy: self.policy.clone() })
    }

    /// Applies the rules requested by a verb.
    pub fn with_request(&self, request: ask::Shape) -> Result<Shaping, Failure> {
        let ask::Shape { split, merge, recorded, policy } = request;
        let invalid = |why: &str| {
            let refused = Failure::new("set how transfers are split and merged", why);
            Err(refused.of_kind(Kind::Invalid))
        };
        match (recorded, policy) {
            (false, None) => self.changed(split, merge),
            (false, Some(_)) => invalid("a policy only comes from a daemon's catalogue"),
            (true, Some(policy)) if !has_sizes_of_a_policy(&policy) => {
                invalid("the sizes of a policy must be powers of two from 4K to 16M")
            }
            (true, policy) => Shaping { policy, ..Shaping::default() }.changed(split, merge),
        }
    }

    /// Returns the sizes for the engine.
    pub fn in_force(&self) -> ShapePolicy {
        let bytes = |rule, of_policy: fn(&PolicyNote) -> Option<u64>| match rule {
            SizeRule::None => None,
            SizeRule::Bytes(bytes) => Some(bytes),
            SizeRule::Auto => self.policy.as_ref().and_then(of_policy),
        };
        ShapePolicy { split: bytes(self.split, |policy| policy.split), merge: bytes(self.merge, |policy| policy.merge) }
    }

    /// Returns the reply to a client.
    pub fn reply(&self, counts: ShapeCounts) -> answer::Shape {
        let ShapePolicy { split, merge } = self.in_force();
        answer::Shape {
            split: self.split,
            merge: self.merge,
            split_bytes: split,
            merge_bytes: merge,
            policy: self.policy.clone(),
            splits: counts.splits,
            merges: counts.merges,
            redone: counts.redone,
        }
    }

    /// Returns a log line, if transfers are shaped or there is a policy.
    pub fn line(&self) -> Option<String> {
        let policy = self.in_force();
        let parts = [
            policy.split.map(|bytes| format!("split into {}", control::size::readable(bytes))),
            policy.merge.map(|bytes| format!("merged up to {}", control::size::readable(bytes))),
        ];
        let what: Vec<String> = parts.into_iter().flatten().collect();
        match (what.is_empty(), &self.policy) {
            (true, None) => None,
            (true, Some(policy)) => Some(format!("policy {}: transfers are left alone", policy.name())),
            (false, Some(policy)) => Some(format!("policy {}: transfers are {}", policy.name(), what.join(" and "))),
            (false, None) => Some(format!("transfers are {}", what.join(" and "))),
        }
    }
}

fn has_sizes_of_a_policy(policy: &PolicyNote) -> bool {
    Sizes { split: policy.split, merge: policy.merge }.not_allowed().is_none()
}

/// Reads a policy file, which must belong to the image's storage.
fn policy_of(path: &Path, name: &ImageName, file: Option<&ImageFile>) -> Result<PolicyNote, Failure> {
    let policy = policy::read(path)?;
    let file = file.ok_or_else(|| Failure::new(format!("find the storage of {name}"), "it has no file"))?;
    policy::must_be_of(&policy, path, &policy::storage(name, file)?, &name.to_string())?;
    Ok(policy::note(&policy, path))
}

#[cfg(test)]
mod test {
    use super::*;

    fn note() -> PolicyNote {
        PolicyNote { file: "p".into(), split: Some(8192), merge: None, ..PolicyNote::default() }
    }

    #[test]
    fn auto_follows_the_policy_and_is_refused_without_one() {
        let shaping = Shaping { policy: Some(note()), ..Shaping::default() };
        assert!(shaping.in_force().is_none(), "a policy alone does nothing");
        let auto = shaping.changed(Some(SizeRule::Auto), Some(SizeRule::Auto)).unwrap();
        assert_eq!(auto.in_force(), ShapePolicy { split: Some(8192), merge: None });
        let mixed = auto.changed(None, Some(SizeRule::Bytes(65_536))).unwrap();
        assert_eq!(mixed.in_force(), ShapePolicy { split: Some(8192), merge: Some(65_536) });
        assert!(mixed.changed(Some(SizeRule::None), Some(SizeRule::None)).unwrap().in_force().is_none());
        let refused = Shaping::default().changed(Some(SizeRule::Auto), None).unwrap_err();
        assert!(refused.to_string().contains("--io-policy"), "{refused}");
    }

    #[test]
    fn recorded_rules_replace_all_others() {
        let by_hand = Shaping::default().changed(Some(SizeRule::Bytes(4096)), None).unwrap();
        let recorded = ask::Shape { recorded: true, ..ask::Shape::default() };
        let auto = ask::Shape { split: Some(SizeRule::Auto), policy: Some(note()), ..recorded.clone() };
        let applied = by_hand.with_request(auto.clone()).unwrap();
        assert_eq!(applied.in_force(), ShapePolicy { split: Some(8192), merge: None });
        let forgotten = applied.with_request(recorded.clone()).unwrap();
        assert_eq!((forgotten.in_force().is_none(), &forgotten.policy), (true, &None));
        for wrong in [
            ask::Shape { recorded: false, ..auto.clone() },
            ask::Shape { policy: Some(PolicyNote { split: Some(0), ..note() }), ..auto },
            ask::Shape { merge: Some(SizeRule::Auto), ..recorded },
        ] {
            assert_eq!(applied.with_request(wrong).unwrap_err().kind(), Kind::Invalid);
        }
    }

    #[test]
    fn the_successor_receives_the_sizes_in_force() {
        let shaping = Shaping { policy: Some(note()), ..Shaping::default() };
        let shaping = shaping.changed(Some(SizeRule::Auto), Some(SizeRule::Bytes(4096))).unwrap();
        let words = serde_json::to_string(&shaping).unwrap();
        assert_eq!(serde_json::from_str::<Shaping>(&words).unwrap(), shaping);
    }
}

//! Describes how the transfers of a disk are split and merged, and why.

use control::answer::{self, NOT_FOLLOWED, PolicyNote};
use control::size::readable;
use control::{SizeRule, printable};

use super::Finding;

/// Describes the sizes of a disk's transfers and the reason for them.
pub fn shaped(shape: &answer::Shape) -> Finding {
    let split = shape.split_bytes.map(|bytes| format!("split into pieces of {}", readable(bytes)));
    let merge = shape.merge_bytes.map(|bytes| format!("merged up to {}", readable(bytes)));
    let parts: Vec<String> = split.into_iter().chain(merge).collect();
    let what = if parts.is_empty() { "left as they are".to_owned() } else { parts.join(" and ") };
    let auto = [shape.split, shape.merge].contains(&SizeRule::Auto);
    let (why, advice) = match &shape.policy {
        Some(policy) if auto => {
            let PolicyNote { measured, device, why, .. } = policy;
            let why = match why.strip_prefix(NOT_FOLLOWED) {
                Some(why) => format!("as {why}"),
                None => format!("by the policy {}, measured {measured} on {device}: {why}", policy.name()),
            };
            (why, None)
        }
        Some(policy) => (format!("as requested; the policy {} is not in force", policy.name()), None),
        None if parts.is_empty() => {
            let advice = "tapline sr calibrate, or tapline calibrate without a daemon, measures which suit its storage";
            ("as there is no policy and none was requested".to_owned(), Some(advice.into()))
        }
        None => ("as requested".to_owned(), None),
    };
    let text = format!("Transfers are {what}, {}.", printable(&why));
    Finding { bound: "shape", text, advice }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_sizes_of_transfers_are_shown_with_the_reason() {
        let policy =
            PolicyNote { file: "/p".into(), why: "it gained".into(), device: "sda".into(), ..PolicyNote::default() };
        let none = shaped(&answer::Shape::default());
        assert!(none.text.contains("left as they are") && none.advice.is_some(), "{none:?}");
        let split =
            answer::Shape { split_bytes: Some(16 << 10), split: SizeRule::Bytes(16 << 10), ..answer::Shape::default() };
        assert_eq!(shaped(&split).text, "Transfers are split into pieces of 16 KiB, as requested.");
        let auto = shaped(&answer::Shape { split: SizeRule::Auto, policy: Some(policy.clone()), ..split.clone() });
        assert!(auto.text.contains("by the policy /p") && auto.text.contains("it gained"), "{auto:?}");
        // A disk of the daemon has its repository's policy, which may have been measured on other storage.
        let recorded = PolicyNote { file: String::new(), repository: Some("7d0f".into()), ..policy.clone() };
        let auto = answer::Shape { split: SizeRule::Auto, policy: Some(recorded.clone()), ..split.clone() };
        assert!(shaped(&auto).text.contains("by the policy of repository 7d0f"), "{auto:?}");
        let unused = PolicyNote { why: format!("{NOT_FOLLOWED}it was measured on sdz"), ..recorded };
        let unused = shaped(&answer::Shape { split_bytes: None, policy: Some(unused), ..auto });
        assert_eq!(unused.text, "Transfers are left as they are, as it was measured on sdz.");
        let other = shaped(&answer::Shape { policy: Some(policy), ..split });
        assert!(other.text.contains("/p is not in force"), "{other:?}");
    }
}

//! Shows the response to `--dry-run`: what a destroying verb would do, in sentences.

use std::fmt::Write;

use api::client::Answer;
use api::{Problem, SrDestroyPlan, VdiDestroyPlan};
use control::size::readable;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::session::{Outcome, Session, Waiting, print};

/// A response to `--dry-run`.
pub trait Plan: DeserializeOwned {
    /// Describes what would be done to `what`.
    fn sentences(&self, what: &str) -> String;
}

/// Waits for the response and shows it.
pub async fn show<P: Plan>(
    session: &Session,
    what: &str,
    answer: Answer<Value>,
    waiting: Waiting,
) -> Result<(), Problem> {
    match session.outcome(answer, waiting).await? {
        Outcome::Done(value) => {
            let plan: P = serde_json::from_value(value).map_err(|error| Problem::failed("parse the answer", error))?;
            print(&api::visible(&plan.sentences(what)))
        }
        Outcome::Printed => Ok(()),
    }
}

impl Plan for VdiDestroyPlan {
    fn sentences(&self, what: &str) -> String {
        let mut text = format!("would destroy {what}\n");
        match (self.needed_by, self.removes.as_slice()) {
            (0, []) => text += "no file would be removed\n",
            (0, removes) => {
                // Writing to a string cannot fail.
                writeln!(text, "would free {}, and remove {}", readable(self.freed), files(removes))
                    .unwrap_or_default();
            }
            (needed_by, _) => {
                let those = if needed_by == 1 { "another image is".into() } else { format!("{needed_by} images are") };
                writeln!(text, "would remove no file, and free nothing yet: {those} based on its own")
                    .unwrap_or_default();
            }
        }
        text
    }
}

impl Plan for SrDestroyPlan {
    fn sentences(&self, what: &str) -> String {
        let mut text = format!("would destroy {what}\nwould remove {}\n", files(&self.removes));
        if !self.leaves.is_empty() {
            writeln!(text, "would leave, as it is not the repository's: {}", files(&self.leaves)).unwrap_or_default();
        }
        text
    }
}

/// The number of files and their names.
fn files(names: &[String]) -> String {
    match names {
        [] => "no file".into(),
        [name] => format!("the file {name}"),
        names => format!("{} files:\n  {}", names.len(), names.join("\n  ")),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_dry_run_reads_as_sentences() {
        let vdi = |removes: &[&str], needed_by| VdiDestroyPlan {
            removes: removes.iter().map(|name| (*name).to_owned()).collect(),
            freed: 136 << 10,
            needed_by,
        };
        let what = "disk \"web\" (3dea…)";
        assert_eq!(
            vdi(&["a.qcow2"], 0).sentences(what),
            "would destroy disk \"web\" (3dea…)\nwould free 136 KiB, and remove the file a.qcow2\n"
        );
        assert_eq!(
            vdi(&[], 2).sentences(what),
            "would destroy disk \"web\" (3dea…)\n\
             would remove no file, and free nothing yet: 2 images are based on its own\n"
        );
        let sr = SrDestroyPlan { removes: vec!["a".into(), "b".into()], leaves: vec!["notes".into()] };
        assert_eq!(
            sr.sentences("repository"),
            "would destroy repository\nwould remove 2 files:\n  a\n  b\n\
             would leave, as it is not the repository's: the file notes\n"
        );
    }
}

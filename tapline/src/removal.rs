//! What a destroying verb would do: the response to `--dry-run`.

use api::Problem;
use api::client::Answer;
use serde_json::Value;

use crate::session::{Outcome, Session, Waiting, print};

/// Shows the response.
pub async fn told(session: &Session, answer: Answer<Value>, waiting: Waiting) -> Result<(), Problem> {
    match session.outcome(answer, waiting).await? {
        Outcome::Done(value) => print(&api::visible(&lines(&value, 0))),
        Outcome::Told => Ok(()),
    }
}

/// An object's fields and a list's members, one per line, with nested values indented below.
fn lines(value: &Value, depth: usize) -> String {
    let indent = " ".repeat(depth.saturating_mul(2));
    match value {
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| match value {
                Value::Object(_) | Value::Array(_) => {
                    format!("{indent}{name}:\n{}", lines(value, depth.saturating_add(1)))
                }
                _ => format!("{indent}{name}: {}", lines(value, 0)),
            })
            .collect(),
        Value::Array(members) => members.iter().map(|member| lines(member, depth)).collect(),
        Value::String(text) => format!("{indent}{text}\n"),
        other => format!("{indent}{other}\n"),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_dry_run_is_shown_line_by_line() {
        let value = serde_json::json!({"bytes": 7, "files": ["a", "b"], "vdi": {"name": "root"}});
        assert_eq!(lines(&value, 0), "bytes: 7\nfiles:\n  a\n  b\nvdi:\n  name: root\n");
    }
}

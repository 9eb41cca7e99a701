//! Lines of an inventory, each of which ends with its own hash: pure functions.

use api::{InventoryImage, InventoryVdi, Problem};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Change, Contents, Words};
use crate::hash::{DIGITS, hash};

/// The version of the file that this program writes, and the last that it understands.
pub const VERSION: u32 = 1;

/// The separator between the hashed text and the hash.
const BEFORE_SUM: &str = ",\"sum\":\"";
const BEHIND_SUM: &str = "\"}";

/// A line of the catalogue's outbox: what one commit has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// How many changes there were with this one.
    pub generation: u64,
    /// The head before.
    pub before: String,
    /// The head of this line.
    pub head: String,
    /// The text, including the line end.
    pub text: String,
}

/// The first line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    #[serde(rename = "tapline-inventory")]
    pub version: u32,
    pub sr: Uuid,
    pub generation: u64,
    pub head: String,
    pub at: Timestamp,
    pub words: Words,
    pub images: Vec<InventoryImage>,
    pub vdis: Vec<InventoryVdi>,
    pub history: Vec<(u64, String)>,
    #[serde(skip_serializing, rename = "sum")]
    _sum: String,
}

/// Every other one.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Changes {
    pub generation: u64,
    pub before: String,
    pub at: Timestamp,
    pub changes: Vec<Change>,
    #[serde(skip_serializing)]
    pub sum: String,
}

/// The part that is parsed first.
#[derive(Deserialize)]
pub struct Versioned {
    #[serde(rename = "tapline-inventory")]
    pub version: u32,
}

/// The head of a history that begins: another one each time.
pub fn first_head() -> String {
    Uuid::new_v4().simple().to_string()
}

/// The first line of a file, with its line end.
pub fn header(
    sr: Uuid,
    generation: u64,
    head: &str,
    contents: &Contents,
    history: Vec<(u64, String)>,
) -> Result<String, Problem> {
    let header = Header {
        version: VERSION,
        sr,
        generation,
        head: head.into(),
        at: Timestamp::now(),
        words: contents.words.clone(),
        images: contents.images.values().cloned().collect(),
        vdis: contents.vdis.values().cloned().collect(),
        history,
        _sum: String::new(),
    };
    seal(&header).map(|(text, _)| text)
}

impl Line {
    /// The changes of a commit after `before`.
    pub fn new(generation: u64, before: String, changes: Vec<Change>) -> Result<Line, Problem> {
        let line = Changes { generation, before, at: Timestamp::now(), changes, sum: String::new() };
        let (text, head) = seal(&line)?;
        Ok(Line { generation, before: line.before, head, text })
    }

    /// A line as it was kept.
    pub fn parse(text: String) -> Result<Line, Problem> {
        let parsed = parse::<Changes>(&text).map_err(|why| Problem::failed("parse an inventory line", why))?;
        Ok(Line { generation: parsed.generation, before: parsed.before, head: parsed.sum, text })
    }
}

/// The text of a line with its line end, and its hash.
fn seal(line: &impl Serialize) -> Result<(String, String), Problem> {
    let mut text = serde_json::to_string(line).map_err(|error| Problem::failed("encode an inventory", error))?;
    text.pop();
    let sum = hash(&text);
    text.extend([BEFORE_SUM, &sum, BEHIND_SUM, "\n"]);
    Ok((text, sum))
}

/// Parses a line, if its hash is correct.
pub fn parse<T: for<'a> Deserialize<'a>>(text: &str) -> Result<T, String> {
    let text = text.strip_suffix('\n').unwrap_or(text);
    let sealed = text.strip_suffix(BEHIND_SUM).and_then(|text| text.split_at_checked(text.len().checked_sub(DIGITS)?));
    let Some((Some(said), sum)) = sealed.map(|(said, sum)| (said.strip_suffix(BEFORE_SUM), sum)) else {
        return Err("it does not end with a hash".into());
    };
    if hash(said) != sum {
        return Err("its hash does not match".into());
    }
    serde_json::from_str(text).map_err(|error| error.to_string())
}

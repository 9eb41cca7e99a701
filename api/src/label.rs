//! Labels of objects: tags to find them by, and a map of strings for programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::openapi::schema::{AdditionalProperties, ArrayBuilder, ObjectBuilder, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::visible::refuse_unseen;

/// Maximum characters of a tag.
const TAG_MAX: usize = 64;
/// Maximum tags of an object.
const TAGS_MAX: usize = 64;
/// Maximum characters of a key.
const KEY_MAX: usize = 128;
/// Maximum keys of an object.
const KEYS_MAX: usize = 64;
/// Maximum bytes of all keys and values of an object. An inventory line has them all.
const CONFIG_MAX: usize = 16 << 10;

/// A tag: a word of 1 to 64 characters, without whitespace, commas and control characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tag(String);

/// The tags of an object, at most 64.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "BTreeSet<Tag>", into = "BTreeSet<Tag>")]
pub struct Tags(BTreeSet<Tag>);

/// Strings that programs keep with an object: at most 64 keys, and 16 KiB in all. Tapline does not interpret them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>", into = "BTreeMap<String, String>")]
pub struct OtherConfig(BTreeMap<String, String>);

/// Both of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// Its tags.
    pub tags: Tags,
    /// The strings that programs keep with it.
    pub other_config: OtherConfig,
}

impl TryFrom<String> for Tag {
    type Error = String;

    fn try_from(text: String) -> Result<Tag, String> {
        if text.chars().any(|char| char.is_control() || char.is_whitespace() || char == ',') {
            return Err("a tag must not contain whitespace, commas or control characters".into());
        }
        match text.chars().count() {
            0 => Err("a tag must not be empty".into()),
            count if count > TAG_MAX => Err(format!("a tag must have at most {TAG_MAX} characters, not {count}")),
            _ => Ok(Tag(text)),
        }
    }
}

impl TryFrom<BTreeSet<Tag>> for Tags {
    type Error = String;

    fn try_from(tags: BTreeSet<Tag>) -> Result<Tags, String> {
        match tags.len() {
            count if count > TAGS_MAX => Err(format!("an object must have at most {TAGS_MAX} tags, not {count}")),
            _ => Ok(Tags(tags)),
        }
    }
}

impl TryFrom<BTreeMap<String, String>> for OtherConfig {
    type Error = String;

    fn try_from(map: BTreeMap<String, String>) -> Result<OtherConfig, String> {
        let is_key = |key: &String| {
            (1..=KEY_MAX).contains(&key.chars().count()) && !key.chars().any(|char| char.is_control() || char == '=')
        };
        if let Some(key) = map.keys().find(|key| !is_key(key)) {
            let shown: String = key.escape_debug().take(KEY_MAX).collect();
            return Err(format!(
                "a key of other_config must have 1 to {KEY_MAX} characters, without '=' and control characters, \
                 unlike '{shown}'"
            ));
        }
        let is_text = |value: &&String| !value.chars().any(|char| char.is_control() && !"\n\t".contains(char));
        if let Some((key, _)) = map.iter().find(|(_, value)| !is_text(value)) {
            return Err(format!(
                "the value of '{key}' must not contain control characters other than line feeds and tabs"
            ));
        }
        if map.len() > KEYS_MAX {
            return Err(format!("other_config must have at most {KEYS_MAX} keys, not {}", map.len()));
        }
        let bytes = map.iter().fold(0_usize, |sum, (key, value)| sum.saturating_add(key.len() + value.len()));
        if bytes > CONFIG_MAX {
            return Err(format!("other_config must have at most {CONFIG_MAX} bytes, not {bytes}"));
        }
        Ok(OtherConfig(map))
    }
}

/// Tags that somebody gives in a request: checked more strictly than recorded ones.
pub(crate) fn given_tags<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Tags, D::Error> {
    let words = BTreeSet::<String>::deserialize(deserializer)?;
    let tags = words.iter().map(|word| word.parse::<Tag>()).collect::<Result<BTreeSet<_>, _>>();
    tags.and_then(Tags::try_from).map_err(D::Error::custom)
}

/// The same for a field that may be omitted.
pub(crate) fn given_tags_if<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Tags>, D::Error> {
    #[derive(Deserialize)]
    struct Given(#[serde(deserialize_with = "given_tags")] Tags);
    Ok(Option::<Given>::deserialize(deserializer)?.map(|given| given.0))
}

impl From<Tag> for String {
    fn from(tag: Tag) -> String {
        tag.0
    }
}

impl From<Tags> for BTreeSet<Tag> {
    fn from(tags: Tags) -> BTreeSet<Tag> {
        tags.0
    }
}

impl From<OtherConfig> for BTreeMap<String, String> {
    fn from(config: OtherConfig) -> BTreeMap<String, String> {
        config.0
    }
}

impl FromStr for Tag {
    type Err = String;

    fn from_str(text: &str) -> Result<Tag, String> {
        refuse_unseen("a tag", text)?;
        text.to_owned().try_into()
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Tags {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all of these are among them.
    pub fn have_all(&self, wanted: &[Tag]) -> bool {
        wanted.iter().all(|tag| self.0.contains(tag))
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Tag> {
        self.0.iter()
    }
}

impl OtherConfig {
    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All keys with their values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &String)> {
        self.0.iter()
    }
}

impl PartialSchema for Tag {
    fn schema() -> RefOr<Schema> {
        let text = ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).max_length(Some(TAG_MAX));
        let text = text.pattern(Some(r"^[^\s,\x00-\x1f\x7f-\x9f]+$"));
        text.description(Some("A word to find objects by, without whitespace and commas.")).into()
    }
}

impl PartialSchema for Tags {
    fn schema() -> RefOr<Schema> {
        let all = ArrayBuilder::new().items(Tag::schema()).max_items(Some(TAGS_MAX));
        all.description(Some("Words to find the object by.")).into()
    }
}

impl PartialSchema for OtherConfig {
    fn schema() -> RefOr<Schema> {
        let value = ObjectBuilder::new().schema_type(Type::String).max_length(Some(CONFIG_MAX));
        let value = value.pattern(Some(r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$"));
        let key = ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).max_length(Some(KEY_MAX));
        let key = key.pattern(Some(r"^[^=\x00-\x1f\x7f-\x9f]+$"));
        let map = ObjectBuilder::new().schema_type(Type::Object).max_properties(Some(KEYS_MAX));
        let map = map.property_names(Some(Schema::Object(key.build())));
        let map = map.additional_properties(Some(AdditionalProperties::RefOr(value.into())));
        map.description(Some("Strings that programs keep with the object: 16 KiB in all.")).into()
    }
}

impl ToSchema for Tag {}
impl ToSchema for Tags {}
impl ToSchema for OtherConfig {}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_tag_is_a_short_word() {
        assert!("prod".parse::<Tag>().is_ok() && "tier:1/web_№".parse::<Tag>().is_ok());
        for wrong in ["", "a b", "a,b", "a\n", "a\u{7f}", &"x".repeat(TAG_MAX + 1)] {
            assert!(wrong.parse::<Tag>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_tags_of_an_object_are_a_set_of_bounded_size() {
        let of = |count: usize| serde_json::json!((0..count).map(|n| format!("t{n}")).collect::<Vec<_>>());
        assert!(serde_json::from_value::<Tags>(of(TAGS_MAX)).is_ok());
        assert!(serde_json::from_value::<Tags>(of(TAGS_MAX + 1)).unwrap_err().to_string().contains("64"));
        let twice: Tags = serde_json::from_str(r#"["b","a","b"]"#).unwrap();
        assert_eq!(serde_json::to_string(&twice).unwrap(), r#"["a","b"]"#);
        assert!(twice.have_all(&["a".parse().unwrap()]) && twice.have_all(&[]));
        assert!(!twice.have_all(&["a".parse().unwrap(), "c".parse().unwrap()]));
    }

    #[test]
    fn other_config_is_bounded_in_keys_and_bytes() {
        let of = |pairs: &[(&str, &str)]| {
            let map: BTreeMap<String, String> =
                pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
            OtherConfig::try_from(map)
        };
        assert!(of(&[("backup.last", "2026-11-22\n"), ("x", "")]).is_ok());
        for wrong in ["", "a=b", "a\n", &"x".repeat(KEY_MAX + 1)] {
            assert!(of(&[(wrong, "")]).is_err(), "{wrong:?}");
        }
        assert!(of(&[("a", "\u{1b}[31m")]).is_err());
        assert!(of(&[("a", &"x".repeat(CONFIG_MAX))]).unwrap_err().contains("16384"));
        let many = (0..=KEYS_MAX).map(|n| (n.to_string(), String::new())).collect::<BTreeMap<_, _>>();
        assert!(OtherConfig::try_from(many).unwrap_err().contains("64 keys"));
    }
}

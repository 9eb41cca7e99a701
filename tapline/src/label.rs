//! Options for tags and `other_config` strings of new, changed and listed objects.

use std::collections::{BTreeMap, BTreeSet};

use api::{OtherConfig, Problem, Tag, Tags};

use crate::word;

/// Labels of a new object.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct NewLabels {
    /// A tag to find it by; may be given several times
    #[arg(long)]
    tag: Vec<Tag>,
    /// A string that a program keeps with it; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = word::pair)]
    config: Vec<(String, String)>,
}

/// Changes of an object's labels.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct ChangeLabels {
    /// A tag to add; may be given several times
    #[arg(long)]
    tag: Vec<Tag>,
    /// A tag to remove; may be given several times
    #[arg(long, value_name = "TAG")]
    no_tag: Vec<Tag>,
    /// A string that a program keeps with it, to add or change; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = word::pair)]
    config: Vec<(String, String)>,
    /// A string of a program to remove; may be given several times
    #[arg(long, value_name = "KEY")]
    no_config: Vec<String>,
}

/// Tags that select objects in a list.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct WithTags {
    /// Only those with this tag; given several times, those with all of them
    #[arg(long)]
    pub tag: Vec<Tag>,
}

impl NewLabels {
    /// Returns the tags and strings in the API's types.
    pub fn values(self) -> Result<(Tags, OtherConfig), Problem> {
        Ok((tags(self.tag.into_iter().collect())?, config(self.config.into_iter().collect())?))
    }
}

impl ChangeLabels {
    /// Whether the object's present labels are needed, because the API replaces them as a whole.
    pub fn changes_some(&self) -> bool {
        !(self.tag.is_empty() && self.no_tag.is_empty() && self.config.is_empty() && self.no_config.is_empty())
    }

    /// Applies the changes to an object's present labels; `None` for what is not changed.
    pub fn of(self, now: (Tags, OtherConfig)) -> Result<(Option<Tags>, Option<OtherConfig>), Problem> {
        let tagged = !self.tag.is_empty() || !self.no_tag.is_empty();
        let configured = !self.config.is_empty() || !self.no_config.is_empty();
        let (mut all, mut map): (BTreeSet<Tag>, BTreeMap<String, String>) = (now.0.into(), now.1.into());
        all.retain(|tag| !self.no_tag.contains(tag));
        all.extend(self.tag);
        map.retain(|key, _| !self.no_config.contains(key));
        map.extend(self.config);
        Ok((tagged.then(|| tags(all)).transpose()?, configured.then(|| config(map)).transpose()?))
    }
}

fn tags(all: BTreeSet<Tag>) -> Result<Tags, Problem> {
    Tags::try_from(all).map_err(|why| Problem::new(api::Code::Invalid, why).field("tags"))
}

fn config(map: BTreeMap<String, String>) -> Result<OtherConfig, Problem> {
    OtherConfig::try_from(map).map_err(|why| Problem::new(api::Code::Invalid, why).field("other_config"))
}

/// Formats tags for a column.
pub fn shown(tags: &Tags) -> String {
    tags.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Formats strings of programs, one per line.
pub fn lines(config: &OtherConfig) -> String {
    config.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod test {
    use super::*;

    fn tag(text: &str) -> Tag {
        text.parse().unwrap()
    }

    #[test]
    fn labels_not_named_are_unchanged() {
        let now: (Tags, OtherConfig) =
            (serde_json::from_str(r#"["a","b"]"#).unwrap(), serde_json::from_str(r#"{"k":"1"}"#).unwrap());
        let none = ChangeLabels { tag: vec![], no_tag: vec![], config: vec![], no_config: vec![] };
        assert!(!none.changes_some());
        assert_eq!(none.clone().of(now.clone()).unwrap(), (None, None));
        let some = ChangeLabels { tag: vec![tag("c")], no_tag: vec![tag("a")], ..none.clone() };
        let (tags, config) = some.of(now.clone()).unwrap();
        assert_eq!((shown(&tags.unwrap()), config), ("b,c".into(), None));
        let some = ChangeLabels { config: vec![("x".into(), "2".into())], no_config: vec!["k".into()], ..none };
        let (tags, config) = some.of(now).unwrap();
        assert_eq!((tags, lines(&config.unwrap())), (None, "x=2".into()));
    }
}

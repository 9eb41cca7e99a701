//! Tips for mistyped command lines.
//!
//! clap suggests every name that is somewhat similar. Here a name is suggested only if it is a likely slip of the
//! fingers, and never if it is a verb that loses data or access. Words of other programs (`virsh`, `xe`, `qm`,
//! `qemu-img`) and former words of Tapline have tips of their own, in `other_words.txt`.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};

/// The tips: `COMMAND WORD: TIP`, where WORD is a verb or an option; `*` is any word.
const OTHER_WORDS: &str = include_str!("other_words.txt");

/// Verbs that are never suggested: a user who confirms a suggestion without reading it would lose data or access.
const NEVER_SUGGESTED: [&str; 15] = [
    "abandon",
    "cancel",
    "destroy",
    "detach",
    "drain",
    "drop-memory",
    "forget",
    "merge",
    "prune",
    "rebase",
    "reconcile",
    "remove",
    "revert",
    "revoke",
    "snapshot-destroy",
];

/// The error of a command line that `command` refused, with tips that help.
#[must_use]
pub fn with_tips(mut error: Error, command: &Command) -> Error {
    let mut command = command.clone();
    command.build();
    let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
    let (words, parsed) = parsed(&command, &usage);
    match error.kind() {
        ErrorKind::InvalidSubcommand => of_verb(&mut error, &words, parsed),
        ErrorKind::MissingSubcommand => {
            if let Some(tip) = tip(&words, "") {
                set_tip(&mut error, tip);
            }
        }
        ErrorKind::UnknownArgument => of_argument(&mut error, &words, parsed),
        _ => {}
    }
    error
}

/// The command that refused the rest of the line, and its words without the program's name.
fn parsed<'a>(command: &'a Command, usage: &str) -> (String, &'a Command) {
    let mut command = command;
    let mut words = Vec::new();
    for word in usage.trim_start_matches("Usage:").split_whitespace().skip(1) {
        let Some(verb) = command.find_subcommand(word) else { break };
        command = verb;
        words.push(word);
    }
    (words.join(" "), command)
}

fn of_verb(error: &mut Error, words: &str, noun: &Command) {
    let Some(typed) = text(error, ContextKind::InvalidSubcommand) else { return };
    let tip = tip(words, &typed).or_else(|| words.is_empty().then(|| nouns_with(noun, &typed)).flatten());
    if let Some(tip) = tip {
        error.remove(ContextKind::SuggestedSubcommand);
        set_tip(error, tip);
        return;
    }
    error.remove(ContextKind::Suggested);
    let verbs = noun.get_subcommands().filter(|verb| !verb.is_hide_set()).map(Command::get_name);
    let near = nearest(&typed, verbs.filter(|verb| !NEVER_SUGGESTED.contains(verb)));
    let of_verbs = near.first().map(|verb| strsim::osa_distance(&typed, verb));
    if let Some((_, tip)) = near_tip(words, &typed).filter(|(letters, _)| of_verbs.is_none_or(|verb| *letters < verb)) {
        error.remove(ContextKind::SuggestedSubcommand);
        set_tip(error, tip);
        return;
    }
    match near.is_empty() {
        true => error.remove(ContextKind::SuggestedSubcommand),
        false => error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(near)),
    };
}

fn of_argument(error: &mut Error, words: &str, verb: &Command) {
    let Some(typed) = text(error, ContextKind::InvalidArg) else { return };
    // The value of an option is not part of its name; other words are values as a whole.
    let option = if typed.starts_with('-') { typed.split(['=', ' ']).next().unwrap_or_default() } else { &typed };
    let suggested = text(error, ContextKind::SuggestedArg);
    let is_near = suggested.is_some_and(|name| is_slip(option, name.split(['=', ' ']).next().unwrap_or_default()));
    // To pass an option as a value is hardly ever meant.
    error.remove(ContextKind::Suggested);
    let tip = tip(words, option).or_else(|| if is_near { None } else { of_definition(words, option, verb) });
    if tip.is_none() && is_near {
        return;
    }
    if error.remove(ContextKind::SuggestedArg).is_some() {
        error.insert(ContextKind::Usage, ContextValue::StyledStr(verb.clone().render_usage()));
    }
    if let Some(tip) = tip {
        set_tip(error, tip);
    }
}

/// A tip that follows from the options that the command has.
fn of_definition(words: &str, typed: &str, verb: &Command) -> Option<String> {
    let has = |long: &str| verb.get_arguments().any(|option| option.get_long() == Some(long));
    let first = verb.get_positionals().next().map(|first| first.get_id().as_str().to_owned());
    match typed {
        "--force" | "-f" if has("yes") => Some(format!("'tapline {words} … --yes' does not ask for confirmation")),
        "--format" | "--output-format" if has("json") && !has("format") => Some("use --json".to_owned()),
        "--vm" | "--vdi" | "--vbd" | "--sr" | "--name" | "--uuid" | "--disk" | "--domain" | "--id" => {
            let first = first?.to_uppercase();
            Some(format!("the first argument needs no option: 'tapline {words} {first}'"))
        }
        _ if typed.strip_prefix('-').is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit())) => {
            let shrinks = if words.ends_with("resize") { ": a disk cannot shrink" } else { "" };
            Some(format!("a number here cannot be negative{shrinks}"))
        }
        _ if typed.starts_with('-') => None,
        _ if typed.split_once('=').is_some_and(|(key, _)| has(key)) => {
            let option = typed.replacen('=', " ", 1);
            Some(format!("that is an option: 'tapline {words} … --{option}'"))
        }
        _ if has("dir") => Some(format!("the storage is an option: 'tapline {words} … --dir {typed}'")),
        _ if has("snapshot") => Some(format!("the snapshot is an option: 'tapline {words} … --snapshot {typed}'")),
        _ if has("iops") => Some(format!("limits are options: 'tapline {words} … --iops {typed}'")),
        _ if has("for") => Some(format!("the program is an option: 'tapline {words} … --for {typed}'")),
        _ if has("new") && has("vm") => Some(format!("the machine is an option: 'tapline {words} … --vm {typed}'")),
        _ if has("disk") => Some(format!("a disk is an option: 'tapline {words} … --disk {typed}'")),
        _ if has("name") => Some(format!("a name is an option: 'tapline {words} … --name {typed}'")),
        _ if has("to") => Some(format!("the target is an option: 'tapline {words} … --to {typed}'")),
        _ => None,
    }
}

/// The tip of the list for a word at this command.
fn tip(words: &str, typed: &str) -> Option<String> {
    tips().find(|tip| tip.command == words && tip.is_for(typed)).map(|tip| tip.text.to_owned())
}

/// The tip of the list for the nearest word of which this is a slip, and by how many letters they differ.
fn near_tip(words: &str, typed: &str) -> Option<(usize, String)> {
    let of_command = tips().filter(|tip| tip.command == words && !tip.loses());
    let near = of_command.flat_map(|tip| tip.word.split('|').map(move |word| (word, tip.text)));
    let near = near.filter(|(word, _)| !word.starts_with('-') && is_slip(typed, word));
    let nearest = near.min_by_key(|(word, _)| strsim::osa_distance(typed, word));
    nearest.map(|(word, text)| (strsim::osa_distance(typed, word), text.to_owned()))
}

/// Where a verb is that was typed without its noun, or joined to it by a hyphen, as `vm-list`.
fn nouns_with(program: &Command, typed: &str) -> Option<String> {
    if let Some((noun, verb)) = typed.split_once(['-', '_']) {
        if program.find_subcommand(noun).is_some_and(|noun| noun.find_subcommand(verb).is_some()) {
            return Some(format!("noun and verb are two words: 'tapline {noun} {verb}'"));
        }
    }
    let having = program.get_subcommands().filter_map(|noun| {
        let verb = noun.find_subcommand(typed)?;
        Some(format!("'tapline {} {}'", noun.get_name(), verb.get_name()))
    });
    let having: Vec<String> = having.collect();
    (!having.is_empty()).then(|| format!("the noun comes first: {}", having.join(", ")))
}

/// The names that differ from what was typed by a slip, the nearest only.
fn nearest<'a>(typed: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut near: Vec<(usize, &str)> =
        names.filter(|name| is_slip(typed, name)).map(|name| (strsim::osa_distance(typed, name), name)).collect();
    near.sort_unstable();
    let least = near.first().map(|(distance, _)| *distance);
    near.into_iter().filter(|(distance, _)| Some(*distance) == least).map(|(_, name)| name.to_owned()).collect()
}

/// Whether one word may be the other with a letter or two left out, added, changed or exchanged.
#[must_use]
pub fn is_slip(typed: &str, name: &str) -> bool {
    let letters = typed.trim_start_matches('-').chars().count();
    let allowed = if letters < 6 { 1 } else { 2 };
    letters > 1 && strsim::osa_distance(typed, name) <= allowed
}

fn text(error: &Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        _ => None,
    }
}

fn set_tip(error: &mut Error, tip: String) {
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
}

/// A line of the list.
struct Tip {
    command: &'static str,
    word: &'static str,
    text: &'static str,
}

impl Tip {
    /// Whether it names a command that loses data or access.
    fn loses(&self) -> bool {
        let mut words = self.text.split(|char: char| !char.is_alphanumeric() && char != '-');
        words.any(|word| word == "--force" || NEVER_SUGGESTED.contains(&word))
    }

    fn is_for(&self, typed: &str) -> bool {
        self.word == "*" || self.word.split('|').any(|word| word == typed)
    }
}

fn tips() -> impl Iterator<Item = Tip> {
    OTHER_WORDS.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).filter_map(|line| {
        let (typed, text) = line.split_once(": ")?;
        let (command, word) = typed.rsplit_once(' ').unwrap_or(("", typed));
        Some(Tip { command, word, text })
    })
}

/// The commands named in tips, between quotes, for a test that they exist; each without `tapline`.
#[must_use]
pub fn named_commands() -> Vec<&'static str> {
    let quoted = tips().flat_map(|tip| tip.text.split('\'').skip(1).step_by(2).collect::<Vec<_>>());
    quoted.filter_map(|quoted| quoted.strip_prefix("tapline ")).collect()
}

#[cfg(test)]
mod test {
    use clap::CommandFactory;

    use super::*;
    use crate::Arguments;

    fn refused(line: &str) -> String {
        let command = Arguments::command().name("tapline");
        let error = command.clone().try_get_matches_from(line.split_whitespace()).unwrap_err();
        with_tips(error, &command).to_string()
    }

    #[test]
    fn only_slips_are_suggested() {
        let said = refused("tapline image creat vhd:x");
        assert!(said.contains("'create'") && !said.contains("replay"), "{said}");
        let said = refused("tapline image info vhd:x --jsn");
        assert!(said.contains("'--json'"), "{said}");
        let said = refused("tapline image info vhd:x --jubilee");
        assert!(!said.contains("tip:"), "{said}");
    }

    #[test]
    fn a_value_with_its_key_is_an_option() {
        let said = refused("tapline image create vhd:x 1G parent=vhd:y");
        assert!(said.contains("'tapline image create … --parent vhd:y'"), "{said}");
    }

    #[test]
    fn a_verb_that_loses_data_is_never_suggested() {
        for typed in ["mergee", "merg", "rebas"] {
            let said = refused(&format!("tapline image {typed} vhd:x"));
            assert!(!said.contains("tip:"), "{said}");
        }
    }

    #[test]
    fn a_slip_in_a_word_of_other_programs_has_its_tip() {
        let said = refused("tapline image inspcet vhd:x");
        assert!(said.contains("tip: use 'tapline image info IMAGE'"), "{said}");
        let said = refused("tapline image remvoe vhd:x");
        assert!(!said.contains("tip:"), "a verb that loses data is not suggested: {said}");
    }

    #[test]
    fn each_line_of_the_list_is_a_tip() {
        let lines = OTHER_WORDS.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).count();
        assert_eq!(tips().count(), lines);
        assert!(tips().all(|tip| !tip.text.is_empty() && !tip.word.is_empty()));
    }
}

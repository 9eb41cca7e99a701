//! Examples, which come first in the help of a command.
//!
//! They are kept in a text for people: `== WORDS OF THE COMMAND`, then sentences, and the lines to type below them.

use std::collections::BTreeMap;

use clap::Command;

/// Those of `tapline image` and `tapline serve`.
pub const OF_IMAGES: &str = include_str!("examples.txt");

/// How wide a help is at most: longer lines are harder to read.
const WIDTH: usize = 120;

/// A help that begins with what the command does, and with examples.
const TEMPLATE: &str = "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

/// The examples of each command, by its words.
pub type Examples<'a> = BTreeMap<&'a str, Vec<Line<'a>>>;

/// A line of an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// What the next lines do.
    Text(&'a str),
    /// To be typed.
    Typed(&'a str),
}

/// Takes a text of examples apart.
pub fn examples(text: &str) -> Examples<'_> {
    let mut all = Examples::new();
    let mut command = None;
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(words) = line.strip_prefix("== ") {
            command = Some(words);
            continue;
        }
        let Some(words) = command else { continue };
        let line = line.strip_prefix("    ").map_or(Line::Text(line), Line::Typed);
        all.entry(words).or_default().push(line);
    }
    all
}

/// Gives each command its examples.
#[must_use]
pub fn teach(command: Command, examples: &Examples<'_>) -> Command {
    teach_below(command, "", examples).max_term_width(WIDTH)
}

fn teach_below(command: Command, words: &str, examples: &Examples<'_>) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    let command = match examples.get(words) {
        Some(lines) => command.help_template(TEMPLATE).before_help(shown(lines)),
        None => command,
    };
    names.into_iter().fold(command, |command, name| {
        let words = format!("{words} {name}");
        command.mut_subcommand(name, |verb| teach_below(verb, words.trim_start(), examples))
    })
}

fn shown(lines: &[Line<'_>]) -> String {
    let mut text = "Examples:".to_owned();
    for line in lines {
        match line {
            Line::Text(sentence) => text.extend(["\n  ", sentence]),
            Line::Typed(typed) => text.extend(["\n      ", typed]),
        }
    }
    text
}

/// Finds fault with examples: a command without any, one for a command that does not exist, or a line that the command
/// does not understand.
#[must_use]
pub fn faults(command: &Command, text: &str) -> Vec<String> {
    let examples = examples(text);
    let mut faults = Vec::new();
    let mut unknown: Vec<&str> = examples.keys().copied().collect();
    without(command, "", &mut |words| match examples.contains_key(words) {
        true => unknown.retain(|known| *known != words),
        false => faults.push(format!("'{words}' has no example")),
    });
    faults.extend(unknown.iter().map(|words| format!("there is no command '{words}'")));
    let typed = examples.iter().flat_map(|(words, lines)| lines.iter().map(move |line| (*words, *line)));
    for (words, line) in typed {
        let Line::Typed(line) = line else { continue };
        let Some(at) = line.find("tapline ") else { continue };
        // A shell has its own words around those of the command.
        let own = line[at..].split([')', '>', '|']).next().unwrap_or_default();
        let parsed = own.split_whitespace().map(|word| word.trim_matches('"'));
        if let Err(refused) = command.clone().try_get_matches_from(parsed) {
            faults.push(format!("'{words}': {line}: {refused}"));
        }
    }
    faults
}

/// Calls `then` with the words of each command that has no others below it.
fn without(command: &Command, words: &str, then: &mut dyn FnMut(&str)) {
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set() && verb.get_name() != "help") {
        let words = format!("{words} {}", verb.get_name());
        without(verb, &words, then);
        // One with verbs may do something by itself, too.
        if !verb.has_subcommands() || verb.is_args_conflicts_with_subcommands_set() {
            then(words.trim_start());
        }
    }
}

#[cfg(test)]
mod test {
    use clap::CommandFactory;

    use super::*;
    use crate::Arguments;

    #[test]
    fn every_command_has_examples_that_it_understands() {
        let faults = faults(&Arguments::command(), OF_IMAGES);
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn faults_of_examples_are_found() {
        let text = "== image create\n    tapline image create --sise 3\n== image grow\n    tapline image grow\n";
        let faults = faults(&Arguments::command(), text).join("\n");
        for fault in ["'image info' has no example", "no command 'image grow'", "--sise"] {
            assert!(faults.contains(fault), "{fault}: {faults}");
        }
    }

    #[test]
    fn help_begins_with_examples() {
        let mut command = teach(Arguments::command(), &examples(OF_IMAGES));
        let help = command.find_subcommand_mut("serve").unwrap().render_long_help().to_string();
        let at = |what: &str| help.find(what).unwrap_or_else(|| panic!("no {what} in {help}"));
        assert!(at("Examples:") < at("    tapline serve qcow2:web.qcow2"), "{help}");
        assert!(at("    tapline serve qcow2:web.qcow2") < at("Usage:"), "{help}");
    }
}

//! Wraps sentences to the width of the terminal.

use std::io::{self, IsTerminal};

use unicode_width::UnicodeWidthStr;

/// Maximum width of a line; longer lines are hard to read.
const WIDEST: usize = 80;
/// Minimum width of a line; a narrower terminal wraps by itself.
const NARROWEST: usize = 40;

/// The width for text on stdout: that of the terminal, at most 80 columns.
pub fn width() -> usize {
    let out = io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok()).flatten();
    size.map_or(WIDEST, |size| usize::from(size.ws_col).clamp(NARROWEST, WIDEST))
}

/// Wraps a text into lines of at most `width` columns. The first line begins with `first`, the others are indented by
/// its width. A word wider than a line stays whole, because it may be a path or a command.
pub fn wrapped(first: &str, text: &str, width: usize) -> String {
    let indent = " ".repeat(first.width());
    let (mut out, mut line, mut is_empty) = (String::new(), first.to_owned(), true);
    for word in text.split_whitespace() {
        if !is_empty && line.width() + 1 + word.width() > width {
            out.push_str(line.trim_end());
            out.push('\n');
            (line, is_empty) = (indent.clone(), true);
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    out.push_str(line.trim_end());
    out.push('\n');
    out
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn lines_are_broken_between_words_and_indented() {
        let text = wrapped("ok   ", "one two three four five /a/path/that/is/wider/than/a/line end", 20);
        let expected = "ok   one two three\n     four five\n     /a/path/that/is/wider/than/a/line\n     end\n";
        assert_eq!(text, expected);
        assert_eq!(wrapped("  ", "", 20), "\n");
    }

    #[test]
    fn wide_characters_count_for_their_width() {
        assert_eq!(wrapped("", "数据 数据 数据", 9), "数据 数据\n数据\n");
    }
}

//! Parses a page of the manual into a list of steps.

/// A page of the manual.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Shell commands that prepare the host.
    pub before: String,
    /// Commands to type and files to save, in order.
    pub steps: Vec<Step>,
    /// Commands that are not typed, each with the reason.
    pub not_typed: Vec<(String, String)>,
}

/// A step of a reader of the page.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Types a command.
    Typed {
        /// The command; it may have several lines.
        command: String,
        /// The expected output.
        printed: Vec<String>,
        /// Whether it must end with an exit status other than zero.
        fails: bool,
        /// Its line number in the page.
        line: usize,
    },
    /// Saves a file.
    File {
        /// The path of the file.
        path: String,
        /// Its contents.
        text: String,
    },
}

/// A fenced block.
struct Block {
    words: String,
    lines: Vec<(usize, String)>,
}

impl Page {
    /// Parses a page; an error contains the line number.
    pub fn parse(text: &str) -> Result<Page, String> {
        let mut page = Page::default();
        let mut block: Option<Block> = None;
        let mut before = false;
        for (line, number) in text.lines().zip(1..) {
            if before {
                before = line.trim() != "-->";
                if before {
                    page.before += &format!("{line}\n");
                }
            } else if let Some(words) = line.strip_prefix("```") {
                match block.take() {
                    Some(block) => page.take(block).map_err(|why| format!("line {number}: {why}"))?,
                    None => block = Some(Block { words: words.trim().to_owned(), lines: Vec::new() }),
                }
            } else if let Some(block) = &mut block {
                block.lines.push((number, line.to_owned()));
            } else if line.starts_with("    ") {
                return Err(format!("line {number}: an indented block is not typed; fence it"));
            } else {
                before = line.trim() == "<!-- before";
            }
        }
        if before || block.is_some() { Err("the end of a comment or block is missing".to_owned()) } else { Ok(page) }
    }

    fn take(&mut self, block: Block) -> Result<(), String> {
        let (language, words) = block.words.split_once(' ').unwrap_or((&block.words, ""));
        if language != "console" {
            let path = words.strip_prefix("file: ").ok_or("a block is `console`, or is saved as a `file: PATH`")?;
            let text = block.lines.iter().map(|(_, line)| format!("{line}\n")).collect();
            self.steps.push(Step::File { path: path.to_owned(), text });
            return Ok(());
        }
        let mut steps = Vec::new();
        for (number, text) in block.lines {
            match (text.strip_prefix("# "), text.strip_prefix("> "), steps.last_mut()) {
                (Some(command), ..) => {
                    let command = command.to_owned();
                    steps.push(Step::Typed { command, printed: Vec::new(), fails: false, line: number });
                }
                (_, Some(more), Some(Step::Typed { command, printed, .. })) if printed.is_empty() => {
                    *command += &format!("\n{more}");
                }
                (_, _, Some(Step::Typed { printed, .. })) => printed.push(text.trim_end().to_owned()),
                _ => return Err(format!("output without a command: {text}")),
            }
        }
        match (words, words.strip_prefix("not-typed: "), steps.last_mut()) {
            (_, _, None) => return Err("a block without a command".to_owned()),
            ("", ..) => {}
            ("fails", _, Some(Step::Typed { fails, .. })) => *fails = true,
            (_, Some(reason), _) if !reason.is_empty() => {
                let commands = steps.into_iter().filter_map(|step| match step {
                    Step::Typed { command, .. } => Some((command, reason.to_owned())),
                    Step::File { .. } => None,
                });
                self.not_typed.extend(commands);
                return Ok(());
            }
            _ => return Err(format!("unknown words after `console`: {words}")),
        }
        self.steps.extend(steps);
        Ok(())
    }
}

#[test]
fn a_page_becomes_steps() {
    let text = "Goal.\n\n<!-- before\nstart_daemon\n-->\n\n```console\n# a \\\n> b\nout\n# c\n```\n\n```console \
                fails\n# d\n```\n```toml file: /etc/x\nkey = 1\n```\n```console not-typed: needs a guest\n# e\n```\n";
    let typed = |command: &str, printed: &[&str], fails, line| Step::Typed {
        command: command.to_owned(),
        printed: printed.iter().map(|&line| line.to_owned()).collect(),
        fails,
        line,
    };
    let page = Page::parse(text).unwrap();
    assert_eq!(page.before, "start_daemon\n");
    let file = Step::File { path: "/etc/x".to_owned(), text: "key = 1\n".to_owned() };
    assert_eq!(
        page.steps,
        [typed("a \\\nb", &["out"], false, 8), typed("c", &[], false, 11), typed("d", &[], true, 15), file]
    );
    assert_eq!(page.not_typed, [("e".to_owned(), "needs a guest".to_owned())]);
}

#[test]
fn what_would_be_left_untyped_is_refused() {
    for text in
        ["    # a\n", "```\n# a\n```\n", "```console\nout\n```\n", "```console maybe\n# a\n```\n", "```console\n# a\n"]
    {
        assert!(Page::parse(text).is_err(), "{text}");
    }
}

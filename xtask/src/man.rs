//! `cargo xtask man`: regenerates the manual pages that derive from definitions.
//!
//! `tapline` writes the pages of its commands. The page of `taplined.toml` is generated here from the file that
//! documents the settings. Tests fail if the committed pages are stale.

use std::path::Path;

use testbed::programs::cargo;

/// The directory of the pages.
const PAGES: &str = "docs/man";

/// The file that documents the settings.
const SETTINGS: &str = "docs/taplined.toml";

/// The generated page of the settings.
const SETTINGS_PAGE: &str = "docs/man/taplined.toml.5";

/// Runs the chore.
pub fn run() -> Result<(), String> {
    let mut tapline = cargo();
    tapline.args(["run", "--quiet", "--bin", "tapline", "--", "manual", PAGES]);
    let status = tapline.status().map_err(|error| format!("cannot run cargo: {error}"))?;
    if !status.success() {
        return Err("tapline has not written its pages".into());
    }
    let page = settings_page(&read(SETTINGS.as_ref())?);
    std::fs::write(SETTINGS_PAGE, page).map_err(|error| format!("cannot write {SETTINGS_PAGE}: {error}"))
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// The manual page of the settings, each with the comment before it.
fn settings_page(settings: &str) -> String {
    let mut page = String::from(
        ".TH TAPLINED.TOML 5 \"\" \"Tapline\" \"File Formats\"\n.SH NAME\ntaplined.toml \\- settings of the Tapline daemon\n\
         .SH EXAMPLES\nA daemon that members of a group may use, and that disks of another user's machines can reach:\n.PP\n\
         .EX\n.RS 4\n[api]\ngroup = \"tapline\"\n\n[plug]\nsocket\\-group = \"kvm\"\n.RE\n.EE\n.PP\n\
         Check the file before the daemon is restarted:\n.PP\n.EX\n.RS 4\n\\fBtaplined \\-\\-check\\-config\\fR\n.RE\n.EE\n\
         .SH SETTINGS\n",
    );
    let mut comment = Vec::new();
    let mut begun = false;
    for line in settings.lines() {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            page += &format!(".SH [{}]\n", section.to_uppercase());
        } else if let Some(setting) = line.strip_prefix("#= ").or(Some(line).filter(|line| line.contains(" = "))) {
            let setting = if line.starts_with('#') && !line.starts_with("#=") { None } else { Some(setting) };
            let Some(setting) = setting else {
                comment.push(line.trim_start_matches("# "));
                continue;
            };
            let unset = if line.starts_with("#=") { " (for example; not set by default)" } else { "" };
            page += &format!(".TP\n\\fB{}\\fR{unset}\n{}\n", escaped(setting), escaped(&comment.join("\n")));
            comment.clear();
        } else if let Some(text) = line.strip_prefix('#') {
            comment.push(text.trim_start());
        } else if line.is_empty() && !begun {
            // The comment before the first empty line is about the whole file.
            page += &format!("{}\n", escaped(&comment.join("\n")));
            comment.clear();
            begun = true;
        }
    }
    page + ".SH SEE ALSO\n.BR taplined (8)\n"
}

/// Escapes text for roff: hyphens that can be copied, and no line that looks like a request.
fn escaped(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    let lines = escaped.lines().map(|line| match line.starts_with(['.', '\'']) {
        true => format!("\\&{line}"),
        false => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_committed_page_of_the_settings_is_current_and_has_them_all() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let settings = read(&root.join(SETTINGS)).unwrap();
        let page = settings_page(&settings);
        assert!(read(&root.join(SETTINGS_PAGE)).unwrap_or_default() == page, "it is stale: run cargo xtask man");
        let set = settings.lines().map(|line| line.strip_prefix("#= ").unwrap_or(line));
        for name in set.filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(" = ")) {
            assert!(page.contains(&format!("\\fB{} = ", escaped(name.0))), "{}", name.0);
        }
    }
}

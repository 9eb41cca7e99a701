//! schemathesis, in a Python environment below `build/`: installed once, in a fixed version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use testbed::tool;

/// Pinned: another version may find other errors, which should come with a commit and not unexpectedly.
const VERSION: &str = "4.32.0";

/// Timeout of a response in seconds: a wait for a task takes a minute at most.
const TO_ANSWER: &str = "90";

/// An installed schemathesis.
pub struct Tester {
    directory: PathBuf,
}

/// The address and credentials of the daemon.
pub struct Target {
    /// The URL `https://127.0.0.1:PORT`.
    pub url: String,
    /// The CA certificate of the daemon.
    pub ca: PathBuf,
    /// The secret of a token.
    pub token: String,
    /// The existing objects, as a configuration of schemathesis.
    pub hints: String,
}

impl Tester {
    /// Installs it below `build` if necessary; an error contains why that is impossible.
    pub fn install(build: &Path) -> Result<Tester, String> {
        let tester = Tester { directory: build.join(format!("schemathesis-{VERSION}")) };
        if tester.program("st").is_file() {
            return Ok(tester);
        }
        println!("fetching schemathesis {VERSION}");
        let failed = |error: tool::ToolError| format!("schemathesis cannot be had: {error}");
        tool::text(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&tester.directory)).map_err(failed)?;
        let mut pip = Command::new(tester.program("pip"));
        pip.args(["install", "--quiet", "--disable-pip-version-check", &format!("schemathesis=={VERSION}")]);
        tool::text(&mut pip).map_err(failed)?;
        Ok(tester)
    }

    fn program(&self, name: &str) -> PathBuf {
        self.directory.join("bin").join(name)
    }

    /// Tests everything in the document.
    pub fn test(&self, document: &Path, target: &Target, max_examples: u32, seed: u64) -> Result<(), String> {
        let work = self.directory.join("work");
        fs::create_dir_all(&work).map_err(|error| format!("{}: {error}", work.display()))?;
        let config = work.join("schemathesis.toml");
        fs::write(&config, &target.hints).map_err(|error| format!("{}: {error}", config.display()))?;
        let mut st = Command::new(self.program("st"));
        st.arg("--config-file")
            .arg(&config)
            .arg("run")
            .arg(document)
            .args(["--url", &target.url])
            .arg("--tls-verify")
            .arg(&target.ca);
        st.args(["--header", &format!("Authorization: Bearer {}", target.token)]);
        st.args(["--seed", &seed.to_string(), "--max-examples", &max_examples.to_string()]);
        st.args(["--request-timeout", TO_ANSWER, "--generation-database", "none", "--workers", "2", "--no-color"]);
        // A valid request may be refused for reasons that are not in the document, such as a plug of a plugged VBD.
        st.args(["--checks", "all", "--exclude-checks", "positive_data_acceptance"]);
        // The stream of events does not end, which the tester does not support.
        st.args(["--exclude-path", "/v1/events"]);
        let status =
            st.current_dir(&work).status().map_err(|error| format!("cannot run {}: {error}", tool::line_of(&st)))?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("the API is not as its document says ({status}): see above"))
        }
    }

    /// Checks a catalogue that is not in use with SQLite.
    pub fn check_catalogue(&self, catalogue: &Path) -> Result<(), String> {
        let mut python = Command::new(self.program("python"));
        python.args(["-c", include_str!("catalogue.py")]).arg(catalogue);
        tool::text(&mut python).map(drop).map_err(|error| format!("the catalogue is not sound: {error}"))
    }
}

//! Starters that set no variables of a job, such as `srun` and `mpirun`: each of their tasks would
//! become a job of its own, and training would go on and be wrong. Some of them tell their tasks
//! enough for `gradwire join` to make them one job.
//!
//! [`refusal`] reads their variables. They show several *tasks*, and not a large allocation: a
//! batch script that runs one process inside an allocation is not refused. The environment is an
//! argument, so that the decision is a pure function.

use std::collections::HashMap;

/// Set to 1, it allows a process to be the only rank of a job, whatever started it.
pub const ALONE: &str = "GRADWIRE_ALONE";

/// How to start this program, for the advice.
#[derive(Debug, Clone, Default)]
pub struct Program {
    /// The command line, such as `python train.py`.
    pub command: String,
    /// The words after torchrun's options, if torchrun can start the program.
    pub torchrun: Option<String>,
}

impl Program {
    /// The program of this process, with its arguments.
    pub(crate) fn of_this_process() -> Self {
        let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
        Self { command: words.collect::<Vec<_>>().join(" "), torchrun: None }
    }

    fn words(&self) -> &str {
        if self.command.is_empty() { "PROGRAM" } else { &self.command }
    }
}

/// Why this process must not be the only rank of a job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={value}: {reason}")]
#[non_exhaustive]
pub struct Refusal {
    /// The variable that shows it.
    pub variable: String,
    /// The value of the variable.
    pub value: String,
    /// What the value means, and what to do.
    pub reason: String,
}

/// A variable with the number of tasks, which the starter sets for each task.
struct Counted {
    starter: &'static str,
    tasks: &'static str,
    /// The number of tasks on this host, if a variable has it.
    here: Option<&'static str>,
    /// Whether its tasks can become a job (`gradwire join`).
    joins: bool,
}

/// The starter inside another one comes first: `mpirun` starts its helpers with `srun`, and only
/// its own variables count the tasks.
const COUNTED: &[Counted] = &[
    counted("horovodrun", HOROVOD_SIZE, Some("HOROVOD_LOCAL_SIZE")),
    joinable("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    counted("mpirun", "MVP_COMM_WORLD_SIZE", Some("MVP_COMM_WORLD_LOCAL_SIZE")),
    counted("mpirun", "MV2_COMM_WORLD_SIZE", Some("MV2_COMM_WORLD_LOCAL_SIZE")),
    counted("jsrun", "JSM_NAMESPACE_SIZE", None),
    joinable("mpiexec, or srun with PMI,", "PMI_SIZE", "MPI_LOCALNRANKS"),
    counted("flux", "FLUX_JOB_SIZE", None),
    joinable("srun", SLURM_TASKS, "SLURM_STEP_TASKS_PER_NODE"),
    // Only in a step: a batch script has it as well.
    counted("srun", SLURM_ALLOCATED, None),
];

/// What `gradwire run` sets for each rank, besides what describes the job.
const OWN_SIZE: &str = "GRADWIRE_SIZE";

const HOROVOD_SIZE: &str = "HOROVOD_SIZE";
const HOROVOD_RANK: &str = "HOROVOD_RANK";

const SLURM_TASKS: &str = "SLURM_STEP_NUM_TASKS";
const SLURM_ALLOCATED: &str = "SLURM_NTASKS";

/// Slurm gives batch scripts, interactive shells and its own helpers a step of this number or above
/// (`slurm.h`: `SLURM_INTERACTIVE_STEP` and the constants around it).
const SLURM_SPECIAL_STEPS: u64 = 0xffff_fff0;

const fn counted(
    starter: &'static str,
    tasks: &'static str,
    here: Option<&'static str>,
) -> Counted {
    Counted { starter, tasks, here, joins: false }
}

const fn joinable(starter: &'static str, tasks: &'static str, here: &'static str) -> Counted {
    Counted { starter, tasks, here: Some(here), joins: true }
}

/// A variable with the number of this task. These starters don't say how many there are.
struct Numbered {
    starter: &'static str,
    variable: &'static str,
    /// The largest number that a process outside the starter's tasks has. `None`: it has none.
    outside: Option<u64>,
    advice: Advice,
}

#[derive(Clone, Copy)]
enum Advice {
    /// `gradwire run` over ssh, instead of the starter.
    Launcher,
    /// `gradwire join` in each pod.
    Pods,
}

const NUMBERED: &[Numbered] = &[
    numbered("horovodrun", HOROVOD_RANK, None, Advice::Launcher),
    numbered("mpirun", "OMPI_COMM_WORLD_RANK", None, Advice::Launcher),
    // A batch script is task 0, too.
    numbered("srun", "SLURM_PROCID", Some(0), Advice::Launcher),
    numbered("a starter with PMIx", "PMIX_RANK", None, Advice::Launcher),
    numbered("a starter with PMI", "PMI_RANK", None, Advice::Launcher),
    numbered("mpiexec of PALS", "PALS_RANKID", None, Advice::Launcher),
    numbered("aprun", "ALPS_APP_PE", None, Advice::Launcher),
    numbered("blaunch", "LSF_PM_TASKID", None, Advice::Launcher),
    // The batch script itself runs on host 0 of the job, as task 1.
    numbered("pbsdsh", "PBS_NODENUM", Some(0), Advice::Launcher),
    numbered("pbsdsh", "PBS_VNODENUM", Some(0), Advice::Launcher),
    numbered("pbsdsh", PBS_TASK, Some(1), Advice::Launcher),
    numbered("Kubernetes", "JOB_COMPLETION_INDEX", None, Advice::Pods),
    numbered("the Trainer of Kubeflow", "PET_NODE_RANK", None, Advice::Pods),
];

const PBS_TASK: &str = "PBS_TASKNUM";

const fn numbered(
    starter: &'static str,
    variable: &'static str,
    outside: Option<u64>,
    advice: Advice,
) -> Numbered {
    Numbered { starter, variable, outside, advice }
}

/// What torchrun sets for each process. All together describe a job, for the Python package.
const TORCHRUN: [&str; 6] =
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// Only these show several processes; users also set the address of a master by hand.
const RANKED: usize = 4;

/// Why a process with these variables must not be the only rank of a job; `None` if it may. Pure.
pub fn refusal(variables: &HashMap<String, String>, program: &Program) -> Option<Refusal> {
    let given = |name: &str| variables.get(name).map(|text| text.trim()).filter(|t| !t.is_empty());
    let refuse = |variable: &str, reason: String| {
        let value = variables.get(variable).cloned().unwrap_or_default();
        Some(Refusal { variable: variable.to_owned(), value, reason })
    };
    match given(ALONE) {
        Some("1") => return None,
        None | Some("0") => {}
        Some(_) => {
            return refuse(ALONE, "it must be 1 (one rank, a job of its own) or 0".to_owned());
        }
    }
    if let Some(first) = TORCHRUN[..RANKED].iter().find(|name| given(name).is_some())
        && let Some(reason) = torchrun(&given, program)
    {
        return refuse(first, reason);
    }
    if let Some((row, tasks)) = counted_tasks(variables) {
        // A count that can't be read does not prove that there is a single task.
        let tasks: Option<u64> = tasks.parse().ok();
        if tasks.is_some_and(|tasks| tasks <= 1) {
            return None;
        }
        let here = row.here.and_then(given);
        return refuse(row.tasks, several(row, tasks, here, program));
    }
    if given(OWN_SIZE).is_some_and(|size| size != "1") {
        let reason = format!(
            "gradwire run also sets GRADWIRE_JOB, which is missing here, and each process would be \
             a job of its own; start it once: gradwire run -np RANKS -- {}; or unset {OWN_SIZE}, \
             or set {ALONE}=1, if it is to train alone",
            program.words()
        );
        return refuse(OWN_SIZE, reason);
    }
    let row = NUMBERED.iter().find(|row| {
        // Torque counts differently there.
        let counts = match row.variable {
            PBS_TASK => !is_torque(given("PBS_VERSION")),
            HOROVOD_RANK => given(HOROVOD_SIZE) != Some("1"),
            _ => true,
        };
        let number = given(row.variable).filter(|_| counts);
        // A number that can't be read does not prove that this process is outside.
        let inside = |text: &str| match (text.parse::<u64>(), row.outside) {
            (Ok(number), Some(most)) => number > most,
            _ => true,
        };
        number.is_some_and(inside)
    })?;
    let words = program.words();
    let advice = match row.advice {
        Advice::Pods => format!(
            "let each pod run: gradwire join -- {words}, with PET_NNODES, the number of pods, and \
             PET_MASTER_ADDR, the name of the first one"
        ),
        Advice::Launcher => format!("start it once: gradwire run -H HOST:RANKS,… -- {words}"),
    };
    refuse(
        row.variable,
        format!(
            "{} may have started several processes, and each would be a job of its own; {advice}; \
             or set {ALONE}=1 if each is to train alone",
            row.starter
        ),
    )
}

/// What has started several tasks, if something has: each program that starts a job of its own
/// starts one for each task. Nothing is said inside a job of Gradwire, whose ranks may start jobs.
pub fn several_tasks(variables: &HashMap<String, String>) -> Option<String> {
    let inside = [OWN_SIZE, ALONE].into_iter().any(|name| variables.contains_key(name));
    let (row, tasks) = counted_tasks(variables).filter(|_| !inside)?;
    let tasks: u64 = tasks.parse().ok().filter(|tasks| *tasks > 1)?;
    let starter = row.starter.split(',').next().unwrap_or(row.starter);
    Some(format!("{starter} started {tasks} tasks ({}={tasks})", row.tasks))
}

/// The number of tasks, and the row of its variable.
fn counted_tasks(variables: &HashMap<String, String>) -> Option<(&'static Counted, &str)> {
    let given = |name: &str| variables.get(name).map(|text| text.trim()).filter(|t| !t.is_empty());
    let step = given("SLURM_STEP_ID").and_then(|step| step.parse().ok());
    let in_step = step.is_some_and(|step: u64| step < SLURM_SPECIAL_STEPS);
    let counts = |row: &&Counted| match row.tasks {
        SLURM_ALLOCATED => in_step,
        // It may be left over, and proves nothing.
        HOROVOD_SIZE => given(HOROVOD_SIZE) != Some("1"),
        _ => true,
    };
    COUNTED.iter().filter(counts).find_map(|row| Some((row, given(row.tasks)?)))
}

fn is_torque(version: Option<&str>) -> bool {
    version.is_some_and(|version| version.starts_with("TORQUE"))
}

/// The reason for a process of torchrun that does not become a rank by itself.
fn torchrun<'a>(given: &impl Fn(&str) -> Option<&'a str>, program: &Program) -> Option<String> {
    let agrees = |name: &str, value: &str| given(name).is_none_or(|text| text == value);
    let is_first = agrees("RANK", "0") && agrees("LOCAL_RANK", "0");
    if given("WORLD_SIZE") == Some("1") && is_first && agrees("LOCAL_WORLD_SIZE", "1") {
        return None;
    }
    let missing: Vec<_> = TORCHRUN.into_iter().filter(|name| given(name).is_none()).collect();
    let what = if !missing.is_empty() {
        let verb = if missing.len() == 1 { "is" } else { "are" };
        format!("torchrun also sets {}, which {verb} missing here", missing.join(", "))
    } else {
        "torchrun's variables describe a job for Python programs only".to_owned()
    };
    let way = program.torchrun.as_ref().map_or("", |_| "torchrun or ");
    Some(format!(
        "{what}, and each process would be a job of its own; start it with {way}gradwire run -np \
         RANKS -- {}; or unset the variables, or set {ALONE}=1, if it is to train alone",
        program.words()
    ))
}

fn several(row: &Counted, tasks: Option<u64>, here: Option<&str>, program: &Program) -> String {
    let Counted { starter, .. } = row;
    let count = tasks.map_or("several".to_owned(), |tasks| tasks.to_string());
    let np = tasks.map_or("RANKS".to_owned(), |tasks| tasks.to_string());
    let each = here.and_then(|text| per_host(text, tasks));
    let at = match (each, tasks) {
        // All tasks are on this host.
        (Some(here), Some(tasks)) if here >= tasks => String::new(),
        (Some(here), _) if row.tasks == SLURM_TASKS => {
            format!(" -H $(scontrol show hostnames | sed s/$/:{here}/ | paste -sd,)")
        }
        _ => " -H HOST:RANKS,…".to_owned(),
    };
    let (starter_word, words) = (starter.split(',').next().unwrap_or(starter), program.words());
    let or_join = match row.joins {
        true => format!("; or let its tasks join: {starter_word} … gradwire join -- {words}"),
        false => String::new(),
    };
    format!(
        "{starter} started {count} tasks, and each would be a job of its own; start it once, \
         without {starter_word}: gradwire run -np {np}{at} -- {words}{or_join}; or set {ALONE}=1 \
         if each is to train alone",
    )
}

/// The tasks of each host, if that is the same number: `4`, or `4(x2)` as Slurm writes it.
fn per_host(text: &str, tasks: Option<u64>) -> Option<u64> {
    match text.split_once("(x") {
        None => text.parse().ok(),
        Some((each, hosts)) => {
            let each: u64 = each.parse().ok()?;
            let hosts: u64 = hosts.strip_suffix(')')?.parse().ok()?;
            (each.checked_mul(hosts) == tasks).then_some(each)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(variables: &str) -> Option<Refusal> {
        let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
        let variables = pairs.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
        let command = "python train.py".to_owned();
        refusal(&variables, &Program { command, torchrun: Some("train.py".to_owned()) })
    }

    #[test]
    fn several_tasks_are_refused_with_a_command() {
        let run = |words: &str| format!("gradwire run {words} -- python train.py");
        let cases = [
            (
                "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=8",
                "SLURM_STEP_NUM_TASKS=8: srun started 8 tasks",
                run("-np 8"),
            ),
            (
                "SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=4(x2) PMIX_RANK=0",
                "without srun",
                run("-np 8 -H $(scontrol show hostnames | sed s/$/:4/ | paste -sd,)"),
            ),
            (
                "SLURM_STEP_ID=0 SLURM_NTASKS=8",
                "srun started 8 tasks",
                run("-np 8 -H HOST:RANKS,…"),
            ),
            ("SLURM_NTASKS=8 SLURM_PROCID=3", "SLURM_PROCID=3: srun may", run("-H HOST:RANKS,…")),
            ("OMPI_COMM_WORLD_RANK=0", "mpirun may have", run("-H HOST:RANKS,…")),
            (
                "SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=3,2",
                "5 tasks",
                run("-np 5 -H HOST:RANKS,…"),
            ),
            (
                "SLURM_STEP_NUM_TASKS=4 PMI_SIZE=4 PMI_RANK=1",
                "PMI_SIZE=4: mpiexec, or srun with PMI, started 4",
                run("-np 4 -H HOST:RANKS,…"),
            ),
            (
                "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=2",
                "mpirun started 4 tasks",
                run("-np 4"),
            ),
            (
                "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_STEP_NUM_TASKS=2",
                "OMPI_COMM_WORLD_SIZE=4",
                run("-np 4 -H HOST:RANKS,…"),
            ),
            ("PMI_SIZE=2 PMI_RANK=0 MPI_LOCALNRANKS=2", "without mpiexec:", run("-np 2")),
            ("MV2_COMM_WORLD_SIZE=2", "mpirun started 2 tasks", run("-np 2 -H HOST:RANKS,…")),
            ("MVP_COMM_WORLD_SIZE=2 MVP_COMM_WORLD_LOCAL_SIZE=2", "mpirun", run("-np 2")),
            ("JSM_NAMESPACE_SIZE=6 LSB_DJOB_NUMPROC=7", "jsrun", run("-np 6 -H HOST:RANKS,…")),
            ("FLUX_JOB_SIZE=2", "flux", run("-np 2 -H HOST:RANKS,…")),
            ("HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_SIZE=2", "horovodrun", run("-np 2")),
            ("GRADWIRE_SIZE=2 GRADWIRE_RANK=1", "GRADWIRE_SIZE=2: gradwire run", run("-np RANKS")),
            ("HOROVOD_RANK=1", "horovodrun may have", run("-H HOST:RANKS,…")),
            ("WORLD_SIZE=1 PMI_SIZE=2 MPI_LOCALNRANKS=2", "PMI_SIZE=2: mpiexec", run("-np 2")),
            (
                "HOROVOD_SIZE=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2",
                "mpirun started 2",
                run("-np 2"),
            ),
            (
                "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1 \
                 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2",
                "srun started 2 tasks",
                run("-np 2"),
            ),
            ("PMI_SIZE=many", "started several tasks", run("-np RANKS -H HOST:RANKS,…")),
            ("PMIX_RANK=0 PMIX_NAMESPACE=a", "a starter with PMIx", run("-H HOST:RANKS,…")),
            ("PMI_RANK=0", "a starter with PMI ", run("-H HOST:RANKS,…")),
            ("PALS_RANKID=0", "PALS", run("-H HOST:RANKS,…")),
            ("ALPS_APP_PE=0", "aprun may have", run("-H HOST:RANKS,…")),
            ("LSF_PM_TASKID=1 LSB_DJOB_NUMPROC=4", "blaunch", run("-H HOST:RANKS,…")),
            ("PBS_JOBID=7 PBS_NODENUM=2 PBS_TASKNUM=3", "pbsdsh", run("-H HOST:RANKS,…")),
            ("PBS_JOBID=7 PBS_NODENUM=0 PBS_TASKNUM=3", "PBS_TASKNUM", run("-H HOST:RANKS,…")),
            (
                "JOB_COMPLETION_INDEX=0",
                "Kubernetes may have",
                "let each pod run: gradwire join -- python train.py, with PET_NNODES".to_owned(),
            ),
            (
                "PET_NODE_RANK=1 PET_NNODES=2",
                "PET_NODE_RANK=1: the Trainer of Kubeflow may have",
                "gradwire join -- python train.py".to_owned(),
            ),
            ("LOCAL_RANK=1 WORLD_SIZE=2", "RANK, LOCAL_WORLD_SIZE,", run("-np RANKS")),
            ("RANK=1 WORLD_SIZE=1", "RANK=1: torchrun also sets", run("-np RANKS")),
            ("LOCAL_RANK=0", "LOCAL_RANK=0: torchrun also sets RANK, WORLD", run("-np RANKS")),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a",
                "MASTER_PORT, which is missing here",
                run("-np RANKS"),
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
                "for Python programs only",
                run("-np RANKS"),
            ),
        ];
        for (variables, what, command) in cases {
            let text = answer(variables).expect(variables).to_string();
            assert!(text.contains(what), "{variables}: {text}");
            assert!(text.contains(&command), "{variables}: {text}");
            assert!(text.contains("GRADWIRE_ALONE=1"), "{variables}: {text}");
            assert_eq!(answer(&format!("{variables} GRADWIRE_ALONE=1")), None, "{variables}");
            assert!(answer(&format!("{variables} GRADWIRE_ALONE=0")).is_some(), "{variables}");
        }
    }

    #[test]
    fn one_task_in_an_allocation_is_not_refused() {
        for variables in [
            "",
            "HOME=/root MASTER_ADDR=a MASTER_PORT=1",
            // sbatch: also the script's own task has a number.
            "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_PROCID=0 SLURM_LOCALID=0 \
             SLURM_NNODES=2 SLURM_TASKS_PER_NODE=4(x2) SLURM_ARRAY_TASK_COUNT=9",
            "SLURM_STEP_ID=4294967291 SLURM_NTASKS=8 SLURM_PROCID=0",
            // salloc with an interactive step.
            "SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 PMIX_RANK=0",
            "LSB_JOBID=1 LSB_DJOB_NUMPROC=8 LSB_MCPU_HOSTS=a",
            "PBS_JOBID=1 PBS_NODENUM=0 PBS_VNODENUM=0 PBS_TASKNUM=1 PBS_NP=8 PBS_NODEFILE=f",
            "PBS_JOBID=1 PBS_NODENUM=0 PBS_VNODENUM=0 PBS_TASKNUM=146 PBS_VERSION=TORQUE-2.4.7",
            "OMPI_COMM_WORLD_SIZE=1 SLURM_STEP_NUM_TASKS=4",
            "PMI_SIZE=1 PMI_RANK=0",
            "GRADWIRE_SIZE=1 GRADWIRE_RANK=0",
            "HOROVOD_SIZE=1 HOROVOD_RANK=0",
            "PMI_SIZE= JOB_COMPLETION_INDEX= WORLD_SIZE=",
            "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1",
            "WORLD_SIZE=1",
            "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0",
        ] {
            assert_eq!(answer(variables), None, "{variables}");
        }
    }

    #[test]
    fn several_tasks_are_known_outside_of_a_job() {
        let known = |variables: &str| {
            let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
            several_tasks(&pairs.map(|(name, text)| (name.into(), text.into())).collect())
        };
        let two = "srun started 2 tasks (SLURM_STEP_NUM_TASKS=2)".to_owned();
        assert_eq!(known("SLURM_STEP_NUM_TASKS=2 HOROVOD_SIZE=1"), Some(two));
        for variables in [
            "",
            "SLURM_NTASKS=8 SLURM_PROCID=0",
            "PMI_SIZE=1",
            "PMI_SIZE=many",
            "PMI_SIZE=2 GRADWIRE_SIZE=4",
            "PMI_SIZE=2 GRADWIRE_ALONE=1",
        ] {
            assert_eq!(known(variables), None, "{variables}");
        }
    }

    #[test]
    fn the_override_must_be_0_or_1() {
        let text = answer("GRADWIRE_ALONE=yes").unwrap().to_string();
        assert_eq!(text, "GRADWIRE_ALONE=yes: it must be 1 (one rank, a job of its own) or 0");
        let variables = HashMap::from([("PMI_SIZE".to_owned(), "2".to_owned())]);
        let rust = refusal(&variables, &Program::default()).unwrap().to_string();
        assert!(rust.contains("-- PROGRAM;"), "{rust}");
    }
}

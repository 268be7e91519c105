// The process's copy threads: they start with the first large copy and sleep when there is none.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <mutex>

namespace wbridge {

class Pool {
public:
    // `num_threads` counts the calling thread.
    explicit Pool(std::size_t num_threads);

    void set_num_threads(std::size_t num_threads);
    std::size_t num_threads() const;

    // Calls `work(unit)` for all units and returns when all have returned. The caller works too, so several
    // callers never wait for one another, and it does all of it in a child of fork, which has no threads.
    void run(std::size_t num_units, const std::function<void(std::size_t)> &work);

private:
    struct Job;
    void start_helpers();
    void help(std::size_t index);
    Job *find_work();

    mutable std::mutex mutex_;
    std::condition_variable has_work_;
    std::condition_variable job_left_;
    std::list<Job *> jobs_;
    std::size_t num_threads_;
    std::size_t num_started_ = 0;
    std::atomic<pid_t> owner_{0};
};

}  // namespace wbridge
